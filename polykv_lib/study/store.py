"""The store: one atomic, strict-JSON file a point, found again by what it was computed from."""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import polykv_lib
from polykv_lib.study.record import SCHEMA, Record, Row, dims_of

log = logging.getLogger(__name__)

SCRATCH_PROFILE = "smoke"  # tiny sizes, made to test the machinery: never mixed with other results


def key_of(experiment: str, params: Mapping[str, Any]) -> str:
    """The first 16 hex digits of sha256 over what a point is computed from, as canonical JSON.

    The library's version is part of it: a new one computes everything again.

    Args:
        experiment: name of the experiment.
        params: resolved parameters that decide the result (no output folder, no profile).
    """
    content = {
        "experiment": experiment,
        "params": params,
        "schema": SCHEMA,
        "version": polykv_lib.__version__,
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Store:
    """The records of one profile: `<experiment>/<key>.json` below `write`, then each of `read`."""

    write: Path
    read: tuple[Path, ...] = ()

    def path(self, experiment: str, key: str) -> Path:
        return self.write / experiment / f"{key}.json"

    def get(self, experiment: str, key: str) -> Record | None:
        """The record of a point, from `write` first; a failed one only where there is no other."""
        found = [load(root / experiment / f"{key}.json") for root in (self.write, *self.read)]
        records = [record for record in found if record is not None and record.key == key]
        records.sort(key=lambda record: record.status != "ok")
        return records[0] if records else None

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
    root: Path, *, experiment: str | None = None, include_trials: bool = False
) -> list[Record]:
    """Every readable record below a folder: `data/results`, or the one of a single profile.

    A number that several records of one profile hold (same experiment, table, metric, kind and
    dimensions, and the same CPU where that is the device) is left in one of them, so that no table
    shows it twice. Of records that one version of the library made it is the one with the most
    numbers of agents, so that a series over agents stays of one run and a narrower point only adds
    what is missing; then, and between versions, the latest.
    Failed points are included, without rows. Smoke results are left out unless `root` is their own
    folder.

    Args:
        root: folder searched at any depth.
        experiment: only this one's records; None for all.
        include_trials: also points that were not in their profile's grid when they were computed.

    Returns:
        Records, oldest first.
    """
    files = (f for f in root.rglob("*.json") if SCRATCH_PROFILE not in f.relative_to(root).parts)
    records = [r for r in map(load, files) if r and experiment in (None, r.experiment)]
    records = [r for r in records if include_trials or not is_trial(r)]
    seen: set[tuple[str, ...]] = set()
    kept = []
    for record in _preferred(records):
        own = record.rows if record.status == "ok" else []  # one may have failed a check
        rows = {_identity(record, row): row for row in own}
        fresh = [row for identity, row in rows.items() if identity not in seen]
        seen.update(rows)
        kept.append(record.model_copy(update={"rows": fresh}))
    return sorted(kept, key=_age)


def is_trial(record: Record) -> bool:
    """Whether a point was computed outside its profile's grid, as with `--set`."""
    return record.provenance.get("grid_point", True) is False


def _preferred(records: Sequence[Record]) -> list[Record]:
    """The records whose numbers are kept before those of others: the most preferred first."""
    made: dict[str, tuple[str, str]] = {}  # the age of each version's latest record
    for record in sorted(records, key=_age):
        made[_version(record)] = _age(record)
    return sorted(
        records,
        key=lambda record: (made[_version(record)], _n_agents(record), _age(record)),
        reverse=True,
    )


def _version(record: Record) -> str:
    return str(record.provenance.get("library", ""))


def _n_agents(record: Record) -> int:
    """How many numbers of agents a record's rows have."""
    return len({row.dims.get("n_agents") for row in record.rows})


def _age(record: Record) -> tuple[str, str]:
    return str(record.provenance.get("finished", "")), record.key


def _identity(record: Record, row: Row) -> tuple[str, ...]:
    profile = str(record.provenance.get("profile", ""))
    dims = json.dumps(dims_of(record, row), sort_keys=True)
    return profile, record.experiment, row.table, row.metric, row.kind, dims


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file (text in UTF-8) by way of a temporary one beside it, making its folder.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
