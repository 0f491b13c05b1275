"""What a table of our own numbers is."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Own:
    """One table of our numbers: one line a setting (`by`), one column a metric."""

    title: str
    table: str
    by: tuple[str, ...]
    metrics: tuple[str, ...]
    kind: str = "measured"
