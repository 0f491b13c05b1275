"""What a notebook calls: set up, compute or fetch its point, show it."""

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

import polykv_lib
from polykv_lib.study import params as parameters
from polykv_lib.study import parts, platform, provenance
from polykv_lib.study.estimate import estimate, this_machine
from polykv_lib.study.params import ExperimentParameters, Parameters
from polykv_lib.study.parts import Parts
from polykv_lib.study.record import Failure, Outcome, Record
from polykv_lib.study.rows import pick, tidy
from polykv_lib.study.store import Store, is_trial, key_of
from polykv_lib.study.tables.own import OWN, RUN, own_table

MARK = "… "  # starts each progress line, by which the batch runner forwards them
OUT_OF_MEMORY = ("OutOfMemory", "MemoryError", "can't allocate memory", "out of memory")


def setup(notebook: str, namespace: Mapping[str, Any]) -> Parameters:
    """Checks the parameters among a notebook's globals and prepares the environment; call it first.

    Prints one line: version, interpreter, platform and where results go.

    Args:
        notebook: the notebook's file name without suffix.
        namespace: the notebook's `globals()`, as set by its parameters cell and by papermill.

    Returns:
        The checked parameters.

    Raises:
        ParameterError: a parameter is unknown, misspelt or out of range.
        PlatformError: results cannot be written, or torch cannot compute on the GPU.
    """
    warnings.filterwarnings("ignore", message="IProgress not found")  # progress bars are off
    values = parameters.from_namespace(notebook, namespace)
    chosen = parameters.validate(notebook, values)
    platform.check_writable(chosen.places.results)
    network = ""
    if isinstance(chosen, ExperimentParameters):
        network = "offline, " if platform.set_environment(chosen.MODEL) else "online, "
        if platform.gpus():
            network += f"{platform.check_gpu()}, "
    _print(
        f"polykv_lib {polykv_lib.__version__} in {sys.executable} ({platform.kind()}, "
        f"{network}profile {profile_of(chosen)}); results in {chosen.places.results}"
    )
    return chosen


def profile_of(chosen: Parameters) -> str:
    """The results folder's name: PROFILE, or what this machine's hardware says if it is "auto"."""
    return platform.default_profile(platform.gpus()) if chosen.PROFILE == "auto" else chosen.PROFILE


def store_of(chosen: Parameters) -> Store:
    """The store of the chosen profile: written below OUT_DIR, read from earlier outputs too."""
    profile, places = profile_of(chosen), chosen.places
    earlier = tuple(results / profile for results in places.earlier)
    return Store(write=places.results / profile, read=earlier)


def run_point(experiment: str, chosen: ExperimentParameters) -> Record:
    """The record of these parameters: the stored one, else computed now and stored.

    A failure is stored too, with its type and message, and then raised: the point is computed again
    the next time it is asked for, but for the parts of it that were kept (`study/parts.py`). The
    provenance says whether the profile's grid holds the point; one that it does not hold stays out
    of tables and figures.

    Args:
        experiment: module name in `polykv_lib.study.experiments`.
        chosen: what `setup` returned.

    Returns:
        The point's record, status "ok".

    Raises:
        DoesNotFit: the point needs more memory than this machine has.
    """
    from polykv_lib.study.grid import is_point  # here, because that module imports this one

    store = store_of(chosen)
    key = key_of(experiment, chosen.resolved)
    marks = {"grid_point": is_point(profile_of(chosen), experiment, key)}
    stored = store.get(experiment, key)
    if stored is not None and stored.status == "ok" and not chosen.FORCE:
        _print(f"{experiment} {key} is in the store already; FORCE=True computes it again")
        if is_trial(stored) and marks["grid_point"]:  # the grid has taken it in since
            stored = stored.model_copy(update={"provenance": stored.provenance | marks})
            store.put(stored)
        _say_if_trial(stored)
        return stored
    blank = Record(experiment=experiment, key=key, params=chosen.resolved, status="failed")
    kept = _parts(chosen, experiment, key)
    if names := kept.names:
        _print(f"{experiment} {key}: {len(names)} parts are there from an earlier run")
    clock = Clock(profile=profile_of(chosen))
    try:
        if expected := estimate(chosen, this_machine()):
            _print(expected.checked())
        with parts.keeping(kept):
            outcome = compute(experiment, chosen.resolved)
    except Exception as error:
        failed = blank.model_copy(
            update={
                "error": failure(type(error).__name__, str(error)),
                "provenance": clock.provenance() | marks,
            }
        )
        store.put(failed)
        raise
    record = blank.model_copy(
        update={
            "status": "ok",
            "rows": outcome.rows,
            "samples": outcome.samples,
            "provenance": clock.provenance() | outcome.protocol | marks | kept.provenance(),
        }
    )
    path = store.put(record)
    kept.forget()
    _print(f"{experiment} {key}: {len(record.rows)} rows, stored in {path}")
    _say_if_trial(record)
    return record


def _parts(chosen: ExperimentParameters, experiment: str, key: str) -> Parts:
    """What an earlier run has kept of the point; nothing if it is forced."""
    places, name = chosen.places, f"{experiment}__{key}"
    folders = [
        runs / profile_of(chosen) / "parts" / name / parts.made_with()
        for runs in (places.runs, *(results.parent / "runs" for results in places.earlier))
    ]
    if not chosen.FORCE:
        return Parts(write=folders[0], read=folders[1:])
    anew = Parts(write=folders[0])
    anew.forget()
    return anew


def compute(experiment: str, resolved: Mapping[str, Any]) -> Outcome:
    """Runs `polykv_lib.study.experiments.<experiment>.run`."""
    module = importlib.import_module(f"polykv_lib.study.experiments.{experiment}")
    return module.run(resolved, Progress())


def show(record: Record, table: str) -> pd.DataFrame:
    """One table of a record for reading: a line a setting, a column a metric, interval beside it.

    Args:
        record: a stored point.
        table: name of one of our own tables; any other name shows the rows of that table as stored.
    """
    numbers = tidy([record])
    if table in OWN:
        return own_table(numbers, OWN[table]).drop(columns=["profile", RUN], errors="ignore")
    lines = pick(numbers, table=table).drop(columns=["profile", "experiment", "key", "table"])
    return lines.dropna(axis="columns", how="all").reset_index(drop=True)


def failure(kind: str, message: str) -> Failure:
    """Why a point failed; everything that means "too large for the memory" has one type."""
    if any(sign in f"{kind}: {message}" for sign in OUT_OF_MEMORY):
        kind = "OutOfMemory"
    return Failure(type=kind, message=" ".join(message.split())[:500])


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where and when a point was computed."""

    profile: str
    started: str = field(default_factory=provenance.now)
    start_s: float = field(default_factory=time.perf_counter)

    def provenance(self) -> dict[str, Any]:
        """Everything known about this run once it has ended."""
        return {
            "profile": self.profile,
            "started": self.started,
            "finished": provenance.now(),
            "wall_s": round(time.perf_counter() - self.start_s, 1),
            **provenance.describe(),
            **provenance.from_torch(),
        }


@dataclass
class Progress:
    """Prints what an experiment says, at most one plain line every `every_s` seconds."""

    every_s: float = 10.0
    printed_s: float = -1e9
    write: Callable[[str], None] = lambda text: _print(MARK + text)

    def __call__(self, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self.printed_s >= self.every_s:
            self.printed_s = now_s
            self.write(text)


def _say_if_trial(record: Record) -> None:
    if is_trial(record):
        _print(
            f"{record.experiment} {record.key} is not a point of the grid: stored, but kept out of "
            "the tables"
        )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
