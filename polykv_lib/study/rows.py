"""Stored numbers as one tidy table, which comparison, tables and figures read."""

from collections.abc import Sequence

import pandas as pd

from polykv_lib.study.record import Record

FIELDS = ("experiment", "key", "table", "metric", "value", "unit", "kind", "n", "lo", "hi")
DIMS = (
    "model",
    "codec",
    "protocol",
    "prefix_tokens",
    "text",
    "document",
    "geometry",
    "context_tokens",
    "n_agents",
    "method",
    "control",
    "encoder",
    "layer",
    "rescaled",
)


def tidy(records: Sequence[Record]) -> pd.DataFrame:
    """One line a stored number: the row's fields, then its dims; failed points have none."""
    lines = [
        {**row.dims, **row.model_dump(exclude={"dims"}), "experiment": r.experiment, "key": r.key}
        for r in records
        if r.status == "ok"
        for row in r.rows
    ]
    frame = pd.DataFrame(lines, columns=pd.Index([*FIELDS, *DIMS]))
    return frame.astype({"value": float, "lo": float, "hi": float})


def pick(numbers: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """The lines whose columns hold the wanted values, in their order."""
    for column, value in wanted.items():
        numbers = numbers[numbers[column] == value]
    return numbers


def family(model: str) -> str:
    """The model behind a name: `meta-llama/Meta-Llama-3-8B-Instruct` is `llama-3-8b`."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return name.removeprefix("meta-").removesuffix("-instruct")
