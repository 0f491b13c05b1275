"""What a table of our own numbers is, and what a headline number is."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Own:
    """One table of our numbers: one line a setting (`by`), one column a metric."""

    title: str
    table: str
    by: tuple[str, ...]
    metrics: tuple[str, ...]
    kind: str = "measured"


@dataclass(frozen=True, kw_only=True)
class Headline:
    """One number: which rows hold it, at the largest document, most agents and most items measured.

    `paper` is the published number where the same thing is meant.
    """

    what: str
    table: str
    metric: str
    where: dict[str, str | float] = field(default_factory=dict)
    paper: str = ""
