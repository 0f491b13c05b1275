"""What a headline number is."""

from dataclasses import dataclass, field


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
