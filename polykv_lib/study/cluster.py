"""The batch runner on Dask: one point a worker slot, in a fresh kernel there, into the same store.

Workers see the same folders as the client: a shared file system, as clusters have. What a worker
stored stays stored if the client goes away.
"""

import time
from collections.abc import Sequence
from typing import Any

from distributed import Client, as_completed, get_worker

from polykv_lib.study.grid import Point
from polykv_lib.study.notebook import failure
from polykv_lib.study.params import ExperimentParameters
from polykv_lib.study.platform import EMBEDDED_MODEL, PlatformError
from polykv_lib.study.run import Done, Say, is_stored, run_one, span

TOPIC = "polykv"


def run_on(address: str, points: Sequence[Point], say: Say) -> list[Done]:
    """Runs every point that is not stored yet on the workers of a Dask scheduler.

    A point whose model is not the embedded one asks for a worker with the resource `GPU`. Notebooks
    that only read results run after all others. TIME_BUDGET_MIN holds as in `run`.

    Args:
        address: of the scheduler, such as "tcp://host:8786".
        points: what to run.
        say: receives plain progress lines, from the workers too.

    Raises:
        PlatformError: no scheduler answers there.
    """
    try:
        client = Client(address, timeout=10)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise PlatformError(f"no Dask scheduler answers at {address!r}: {said}") from None
    with client:
        client.subscribe_topic(TOPIC, lambda event: say(event[1]))
        stored = {i for i, point in enumerate(points) if is_stored(point)}
        done = {i: Done(point=points[i], status="stored") for i in stored}
        computing = {i for i, point in enumerate(points) if _computes(point)}
        for group in (computing - stored, set(range(len(points))) - computing):
            if any(needs(points[i]) for i in group) and not _has_gpu(client):
                say("no worker offers a GPU yet; start one with --resources 'GPU=1'")
            done |= _submitted(client, {i: points[i] for i in sorted(group)}, say)
    return [done[i] for i in range(len(points))]


def needs(point: Point) -> dict[str, int]:
    """The Dask resources of a worker that may run a point."""
    return {"GPU": 1} if getattr(point.chosen, "MODEL", EMBEDDED_MODEL) != EMBEDDED_MODEL else {}


def _submitted(client: Client, points: dict[int, Point], say: Say) -> dict[int, Done]:
    start_s, done = time.time(), {}
    futures = {}
    for i, point in points.items():
        budget_s = 60 * getattr(point.chosen, "TIME_BUDGET_MIN", 0)
        deadline_s = start_s + budget_s if budget_s else None
        task = client.submit(_task, point, deadline_s, pure=False, resources=needs(point))
        futures[task] = i
    for future in as_completed(futures):
        i = futures[future]
        lost = future.exception()  # the worker's end, since the task itself catches everything
        error = failure(type(lost).__name__, str(lost)) if lost else None
        done[i] = Done(point=points[i], status="failed", error=error) if lost else future.result()
        after = span(time.time() - start_s)
        say(f"[{len(done)}/{len(points)}] {points[i].label}: {done[i].told} (after {after})")
    return done


def _task(point: Point, deadline_s: float | None) -> Done:
    """On a worker: one point, unless its time budget has passed."""
    if deadline_s is not None and time.time() >= deadline_s:
        return Done(point=point, status="not started")
    worker: Any = get_worker()
    return run_one(point, lambda line: worker.log_event(TOPIC, f"    {point.label} {line.strip()}"))


def _computes(point: Point) -> bool:
    return isinstance(point.chosen, ExperimentParameters)


def _has_gpu(client: Client) -> bool:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return any(worker["resources"].get("GPU") for worker in workers)
