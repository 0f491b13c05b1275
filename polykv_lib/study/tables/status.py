"""What is said of a published number: a status, the reason for it, and ours where there is one."""

from dataclasses import dataclass

REPRODUCED, DIFFERS = "reproduced", "differs"
NOT_COMPARABLE, NOT_RUN = "not comparable", "not run here"


@dataclass(frozen=True, kw_only=True)
class Ours:
    """Our side of one comparison; `value` is None where nothing was run."""

    status: str
    why: str
    value: float | None = None
    n: int | None = None
    lo: float | None = None
    hi: float | None = None
    model: str = ""
    kind: str = ""


def of_interval(inside: bool) -> tuple[str, str]:
    """Status and reason where an interval decides."""
    where = "inside" if inside else "outside"
    return REPRODUCED if inside else DIFFERS, f"the published value is {where} our 95 % interval"
