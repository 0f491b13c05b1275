"""Stored numbers as one tidy table with every column that comparison, tables and figures read."""

from collections.abc import Sequence

import pandas as pd

from polykv_lib.study.record import CPU, Record, dims_of

_FIELDS = ("profile", "experiment", "key", "table", "metric", "value", "unit", "kind")
DIMS = (
    *("model", "codec", "protocol", "prefix_tokens", "text", "document", "geometry"),
    *("context_tokens", "n_agents", "method", "control", "encoder", "layer", "rescaled"),
    *("dtype", "threads", "device", "peer", "version"),
    *("suite", "question", "keep", "family", "role", "policy", "varied", "signal", "direction"),
    *("against", "bytes_share", "distance", "phase", "side", "option", "checks"),
)


def tidy(records: Sequence[Record]) -> pd.DataFrame:
    """One line a stored number, as `store.collect` gives them; unfilled columns are empty."""
    lines = [
        {"profile": str(record.provenance.get("profile", ""))}
        | {"experiment": record.experiment, "key": record.key}
        | row.model_dump(exclude={"dims"})
        | dims_of(record, row)
        for record in records
        for row in record.rows
    ]
    numbers = pd.DataFrame(lines, columns=pd.Index([*_FIELDS, "n", "lo", "hi", *DIMS]))
    return numbers.astype({"value": float, "n": float, "lo": float, "hi": float})


def on_device(row: pd.Series) -> str:
    """A GPU's name, or a CPU's and how many threads ran on it."""
    device, threads = str(row["device"]), row["threads"]
    if not device.startswith(CPU):
        return device
    named = device.removeprefix(f"{CPU}, ")
    return f"{named}, {threads:.0f} thread{'s' if threads > 1 else ''}"


def pick(numbers: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """The lines whose columns hold the wanted values, in their order."""
    for column, value in wanted.items():
        numbers = numbers[numbers[column] == value]
    return numbers


def family(model: str) -> str:
    """The model behind a name: `meta-llama/Meta-Llama-3-8B-Instruct` is `llama-3-8b`."""
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return name.removeprefix("meta-").removesuffix("-instruct")
