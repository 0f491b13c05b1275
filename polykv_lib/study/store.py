"""The store: one atomic, strict-JSON file a point, found again by what it was computed from."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from polykv_lib.study.record import SCHEMA, Record

log = logging.getLogger(__name__)

SCRATCH_PROFILE = "smoke"  # tiny sizes, made to test the machinery: never mixed with other results


def key_of(experiment: str, params: Mapping[str, Any], version: str) -> str:
    """The first 16 hex digits of sha256 over what a point is computed from, as canonical JSON.

    Args:
        experiment: name of the experiment.
        params: resolved parameters that change the result (no output folder, no profile).
        version: the library's version; a new one recomputes everything.
    """
    content = {"experiment": experiment, "schema": SCHEMA, "params": params, "version": version}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Store:
    """Results of one profile: `write` holds `<experiment>/<key>.json`, `read` may hold earlier ones."""

    write: Path
    read: tuple[Path, ...] = ()

    def path(self, experiment: str, key: str) -> Path:
        return self.write / experiment / f"{key}.json"

    def get(self, experiment: str, key: str) -> Record | None:
        """The record of a point, from the written folder first; None if there is no readable one."""
        for root in (self.write, *self.read):
            record = load(root / experiment / f"{key}.json")
            if record is not None and record.key == key:
                return record
        return None

    def put(self, record: Record) -> Path:
        """Writes a record, replacing the one with its key; a reader never sees half a file."""
        path = self.path(record.experiment, record.key)
        write_atomically(path, _text(record))
        return path


def load(path: Path) -> Record | None:
    """The record in a file; None if the file is missing, or broken (said in one warning)."""
    if not path.is_file():
        return None
    try:
        return Record.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]["msg"]
        log.warning("%s is not a valid record and is ignored (%s); run its grid again", path, first)
        return None


def collect(
    root: Path, *, experiment: str | None = None, status: str | None = "ok"
) -> list[Record]:
    """Every record below a folder: all profiles (`data/results`) or one (`data/results/offline`).

    Smoke results are left out unless `root` is their own folder.

    Args:
        root: folder searched at any depth.
        experiment: only this one's records; None for all.
        status: "ok", "failed" or None for both.

    Returns:
        Records, oldest first.
    """
    files = (f for f in root.rglob("*.json") if SCRATCH_PROFILE not in f.relative_to(root).parts)
    records = (load(file) for file in files)
    chosen = [
        record
        for record in records
        if record is not None
        and experiment in (None, record.experiment)
        and status in (None, record.status)
    ]
    return sorted(chosen, key=lambda record: (_finished(record), record.key))


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """Records as a tidy table: one line a row, one column a dimension.

    Where two records hold the same number (same profile, experiment, table, metric, kind and
    dimensions), the one finished last is kept, so that a line never appears twice.

    Returns:
        Columns profile, experiment, key, table, metric, value, unit, kind, n, lo, hi, then dims.
    """
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for record in sorted(records, key=_finished):
        profile = str(record.provenance.get("profile", ""))
        for row in record.rows:
            place = {"profile": profile, "experiment": record.experiment, "key": record.key}
            dims = json.dumps(row.dims, sort_keys=True)
            same = (profile, record.experiment, row.table, row.metric, row.kind, dims)
            lines[same] = place | row.model_dump(exclude={"dims"}) | row.dims
    first = ["profile", "experiment", "key", "table", "metric", "value", "unit", "kind"]
    return pd.DataFrame(list(lines.values()), columns=None if lines else [*first, "n", "lo", "hi"])


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file by way of a temporary one beside it, making its folder.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _finished(record: Record) -> str:
    return str(record.provenance.get("finished", ""))


def _text(record: Record) -> str:
    """Strict JSON with one row and one sample a line, so that a change is readable in a diff."""
    fields = record.model_dump(mode="json", by_alias=True)
    lines = (f"{json.dumps(name)}: {_value(value)}" for name, value in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value:
        items = (json.dumps(item, allow_nan=False, ensure_ascii=False) for item in value)
        return "[\n " + ",\n ".join(items) + "\n]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)
