"""The batch runner: each point that is missing, in a fresh kernel, by papermill."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import papermill
from papermill.exceptions import PapermillExecutionError

from polykv_lib.study import provenance
from polykv_lib.study.estimate import Machine, estimate
from polykv_lib.study.grid import Point, is_point
from polykv_lib.study.notebook import MARK, failure, profile_of, store_of
from polykv_lib.study.params import ExperimentParameters
from polykv_lib.study.record import Failure, Record
from polykv_lib.study.store import is_trial

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Done:
    """What became of a point; `error` is set if and only if it failed."""

    point: Point
    status: Literal["ok", "stored", "failed", "not started"]
    error: Failure | None = None

    @property
    def told(self) -> str:
        """The status in a progress line."""
        return f"FAILED, {self.error.type}: {self.error.message}" if self.error else self.status


def run(points: Sequence[Point], say: Say) -> list[Done]:
    """Runs every point that is not stored yet; a failed one is recorded and the rest goes on.

    Once a point's TIME_BUDGET_MIN has passed, no further computation is started; notebooks that
    only read results still run.

    Args:
        points: what to run, in order.
        say: receives plain progress lines.
    """
    start_s = time.monotonic()
    missing = [point for point in points if not is_stored(point)]
    done: list[Done] = []
    took_s: list[float] = []
    for number, point in enumerate(points, 1):
        place = f"[{number}/{len(points)}] {point.label}"
        begin_s = time.monotonic()
        if point not in missing:
            done.append(Done(point=point, status="stored"))
            say(f"{place}: stored already")
        elif _over_budget(point, begin_s - start_s):
            done.append(Done(point=point, status="not started"))
        else:
            say(f"{place}: started{_left(took_s, len(missing) - len(took_s))}")
            done.append(run_one(point, say))
            took_s.append(time.monotonic() - begin_s)
            say(f"{place}: {done[-1].told} ({span(took_s[-1])})")
    return done


def listing(points: Sequence[Point], machine: Machine) -> Iterator[str]:
    """A line a point, without running it: key, what it is, whether it is stored, its estimate.

    The last line is the time of all that is not stored.
    """
    missing = 0.0
    for point in points:
        line = f"{point.key or '-':16}  {point.label}"
        if not isinstance(point.chosen, ExperimentParameters):
            yield f"{line}: reads results"
            continue
        expected = estimate(point.chosen, machine)
        told = f"{expected.time}; {expected.arithmetic}" if expected else "no estimate"
        refused = "DOES NOT FIT; " if expected and not expected.fits else ""
        stored = "stored already; " if is_stored(point) else ""
        if expected and not (stored or refused):
            missing += expected.seconds or 0
        yield f"{line}, {point.chosen.MODEL}: {stored}{refused}{told}"
    total = f"not stored: about {span(missing)} in all, by these estimates"
    yield total if missing else "nothing with an estimate is missing"


def summary(done: Sequence[Done]) -> str:
    """One line that counts what was done."""
    counts = Counter(d.status for d in done)
    text = (
        f"{len(done)} {'point' if len(done) == 1 else 'points'}: {counts['ok']} run, "
        f"{counts['stored']} stored already, {counts['failed']} failed"
    )
    if not counts["not started"]:
        return text
    finished = len(done) - counts["not started"]
    return f"{text}; time budget reached: {finished} of {len(done)} done, rerun to continue"


def is_stored(point: Point) -> bool:
    """Whether there is a good record of a point, here or among earlier outputs."""
    if not isinstance(point.chosen, ExperimentParameters) or point.chosen.FORCE:
        return False
    experiment, key = point.chosen.experiment, str(point.key)
    record = store_of(point.chosen).get(experiment, key)
    if record is None or record.status != "ok":
        return False
    # A trial that the grid has taken in since goes to its notebook, which marks it as a point.
    return not (is_trial(record) and is_point(profile_of(point.chosen), experiment, key))


def _over_budget(point: Point, elapsed_s: float) -> bool:
    budget = getattr(point.chosen, "TIME_BUDGET_MIN", 0)
    return budget > 0 and elapsed_s >= 60 * budget


def run_one(point: Point, say: Say) -> Done:
    """Runs a point, whatever happens to its kernel, and makes the store agree with what did."""
    started = provenance.now()
    error = execute(point, say)
    if isinstance(point.chosen, ExperimentParameters):
        error = _settle(point.chosen, str(point.key), started, error)
    return Done(point=point, status="failed" if error else "ok", error=error)


def execute(point: Point, say: Say) -> Failure | None:
    """Runs a point's notebook in a fresh kernel; what stopped it, or None."""
    point.executed.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(JUPYTER_PREFER_ENV_PATH="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    try:
        papermill.execute_notebook(
            point.source,
            point.executed,
            parameters=point.chosen.model_dump(),
            kernel_name="python3",
            language="python",
            progress_bar=False,
            coalesce_streams=True,
            store_widget_state=False,
            stdout_file=_Forward(say),
            extra_arguments=["--IPKernelApp.log_level=CRITICAL"],  # it warns of loopback TCP
            cwd=point.source.parent.parent,
        )
    except PapermillExecutionError as error:
        return failure(error.ename, error.evalue)
    except Exception as error:  # whatever happens to one kernel must not stop the other points
        return failure(type(error).__name__.removesuffix("Error"), str(error))
    return None


@dataclass(frozen=True)
class _Forward:
    """A text file for papermill that hands an experiment's progress lines on."""

    say: Say

    def write(self, text: str) -> None:
        for line in text.splitlines():
            if line.startswith(MARK):
                self.say(f"    {line}")

    def flush(self) -> None:
        """Nothing is held back."""


def _settle(
    chosen: ExperimentParameters, key: str, started: str, error: Failure | None
) -> Failure | None:
    """Makes the store agree with what happened, where the kernel could not do so itself."""
    store = store_of(chosen)
    record = store.get(chosen.experiment, key)
    if error is None and record is not None and record.status == "ok":
        return None
    fresh = record is not None and str(record.provenance.get("started", "")) >= started
    if record is None or not fresh:
        record = Record(
            experiment=chosen.experiment,
            key=key,
            params=chosen.resolved,
            status="failed",
            error=error or failure("NoRecord", "the notebook ended without storing its point"),
            provenance={
                "profile": profile_of(chosen),
                "started": started,
                "grid_point": is_point(profile_of(chosen), chosen.experiment, key),
            },
        )
        store.put(record)
    elif record.status == "ok":  # computed and stored, but a check in the notebook failed
        record = record.model_copy(update={"status": "failed", "error": error})
        store.put(record)
    return record.error


def _left(took_s: Sequence[float], n_left: int) -> str:
    """Time left if the missing points take as long as the mean so far; empty for the first."""
    return f", about {span(n_left * sum(took_s) / len(took_s))} left" if took_s else ""


def span(seconds: float) -> str:
    """A duration in words."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
