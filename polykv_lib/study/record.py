"""One point of the study as one record: what experiments, store, tables and figures agree on."""

from dataclasses import field
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue
from pydantic.dataclasses import dataclass

SCHEMA: Final = 1
CPU: Final = "cpu"  # as a device; what its name begins with

Scalar = str | int | FiniteFloat | bool | None


class Row(BaseModel):
    """One number with its unit, its kind and its 95 % interval.

    `value`, `lo` and `hi` are finite or None: a NaN is refused here, so no file ever holds one.
    `n` counts what the interval was taken over (documents, samples or repeats).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: str
    metric: str
    value: FiniteFloat | None
    unit: str
    kind: Literal["measured", "computed", "paper"] = "measured"
    n: int | None = None
    lo: FiniteFloat | None = None
    hi: FiniteFloat | None = None
    dims: dict[str, Scalar] = Field(default_factory=dict)


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Outcome:
    """What an experiment hands back: rows for tables, raw samples, and how it was really run.

    `protocol` holds what only the run knows (dtype and attention in use, model and data
    fingerprints); it is stored with the point's provenance. A row may be given as a plain dict.
    A NaN or infinity anywhere is refused.
    """

    rows: list[Row]
    samples: list[dict[str, JsonValue]] = field(default_factory=list)
    protocol: dict[str, JsonValue] = field(default_factory=dict)


class Failure(BaseModel):
    """Why a point has no rows: an exception's name, "OutOfMemory", "DeadKernel" or "Timeout"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    type: str
    message: str


class Record(BaseModel):
    """One point as it is stored, strict JSON, at `<root>/<experiment>/<key>.json`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, allow_inf_nan=False
    )

    schema_: Literal[1] = Field(default=SCHEMA, alias="schema")
    experiment: str
    key: str
    params: dict[str, JsonValue]
    status: Literal["ok", "failed"]
    rows: list[Row] = Field(default_factory=list)
    samples: list[dict[str, JsonValue]] = Field(default_factory=list)
    error: Failure | None = None
    provenance: dict[str, JsonValue] = Field(default_factory=dict)


def dims_of(record: Record, row: Row) -> dict[str, Scalar]:
    """A row's dimensions; a device that is a CPU has its name, as two CPUs measure two numbers."""
    cpu = record.provenance.get("cpu")
    return row.dims | ({"device": f"{CPU}, {cpu}"} if cpu and row.dims.get("device") == CPU else {})
