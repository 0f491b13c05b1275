"""Decode steps of N agents on one document: time, throughput and bytes of every method."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from scipy import stats

from polykv_lib.attend import native
from polykv_lib.metrics.intervals import CONFIDENCE, Interval, median_interval
from polykv_lib.pool import SharedKVPool
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.speed.decoding import Agents, step_ms
from polykv_lib.study.experiments.speed.timing import per_second, ratio
from polykv_lib.study.record import Row

FULL, PAPER = "full", "paper"  # codecs of what the dense and the published methods read
OTHERS: Final = (
    ("expanded-batch", FULL),
    ("expanded-folded", FULL),
    ("pooled-agent", PAPER),
    ("no-document", None),
    ("no-document-folded", None),
)
NATIVE: Final = (("expanded-native", FULL), ("no-document-native", None))  # where there is a kernel
COMPARED: Final = {
    "over_floor": ("no-document-folded", None),
    "over_native_floor": ("no-document-native", None),
    "faster_than_expanded": ("expanded-batch", FULL),
    "faster_than_folded": ("expanded-folded", FULL),
    "faster_than_native": ("expanded-native", FULL),
    "faster_than_pooled": ("pooled-agent", PAPER),
}
FLOORS: Final = {  # the step without a document by the same kernel
    "expanded-folded": "no-document-folded",
    "expanded-native": "no-document-native",
    "expanded-batch": "no-document",
    "pooled-agent": "no-document",
}
FITTED: Final = (("step_ms", "ms_per_agent", "ms"), ("held_bytes", "bytes_per_agent", "B"))

Weight = tuple[int, int | None, str]  # bytes held, peak, and how the peak was read
Lane = tuple[str, str | None]  # method, and codec of what it reads
Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The methods that are timed on one document; dense caches of at most `max_cache_gb`."""

    lanes: Mapping[Lane, Agents]
    max_cache_gb: float

    @classmethod
    def of(
        cls,
        model: Any,
        pools: Mapping[str, SharedKVPool],
        question: list[int],
        codecs: Sequence[str],
        max_cache_gb: float,
    ) -> "Steps":
        """A pool for each codec, one full-precision copy for all, and the methods beside them."""
        shared = [("shared-pool", codec) for codec in dict.fromkeys((FULL, *codecs))]
        lanes: dict[Lane, Agents] = {
            (method, codec): Agents(
                model=model, pool=pools[codec or FULL], question=question, n=1, method=method
            )
            for method, codec in (*shared, *OTHERS, *(NATIVE if native.is_on() else ()))
        }
        return cls(lanes=lanes, max_cache_gb=max_cache_gb)

    def rows(self, n: int, rounds: int, at: Mapping[str, Any]) -> tuple[list[Row], list[Sample]]:
        """What n agents take, and the time of each round; empty where it would not fit."""
        every = {lane: replace(agents, n=n) for lane, agents in self.lanes.items()}
        fit = {k: agents for k, agents in every.items() if self._fits(agents)}
        times_ms = step_ms(fit, rounds)
        rows, samples = list[Row](), list[Sample]()
        for metric, lane in COMPARED.items():
            for codec in (c for m, c in times_ms if m == "shared-pool" and lane in times_ms):
                pool, other = times_ms["shared-pool", codec], times_ms[lane]
                faster = ratio(pool, other) if metric.startswith("over") else ratio(other, pool)
                dims = dict(at) | {"n_agents": n, "method": "shared-pool", "codec": codec}
                rows.append(row("speedup", metric, faster, "x", dims))
        weights = {lane: _weight(every[lane]) for lane in times_ms}
        for lane in every:
            dims = dict(at) | {"n_agents": n, "method": lane[0], "codec": lane[1]}
            rows += _rows(n, times_ms.get(lane), dims)
            rows += _bytes(lane, weights, dims)
            if lane in times_ms:
                samples.append(dims | {"step_ms": [round(t, 3) for t in times_ms[lane]]})
        return rows, samples

    def _fits(self, agents: Agents) -> bool:
        element = next(agents.model.parameters()).element_size()
        dense = agents.n_copies * agents.pool.full_nbytes(8 * element)
        return dense <= 1e9 * self.max_cache_gb


def _rows(n: int, times_ms: Sequence[float] | None, dims: Mapping[str, Any]) -> Iterator[Row]:
    if times_ms is None:
        yield row("throughput", "step_ms", None, "ms", dims)
        return
    ms = median_interval(times_ms)
    yield row("throughput", "tokens_per_s", per_second(n, ms), "1/s", dims)
    yield row("throughput", "step_ms", ms, "ms", dims)
    yield row("throughput", "step_min_ms", min(times_ms), "ms", dims, n=len(times_ms))


def _weight(agents: Agents) -> Weight:
    held = agents.held()
    try:
        return held, *agents.peak()
    except torch.OutOfMemoryError:
        return held, None, "out of memory"


def _bytes(lane: Lane, weights: Mapping[Lane, Weight], dims: Mapping[str, Any]) -> Iterator[Row]:
    """Bytes held, their peak, and what the peak has above them.

    Without a document that is `step_bytes`, what any step needs for itself (activations, logits).
    With one it is split: peak = held + `step_bytes` of the same kernel's step without a document
    + `scratch_bytes`, so scratch is what reading the document needs, to the peak's accuracy.
    """
    if lane not in weights:
        return
    held, peak, source = weights[lane]
    yield row("throughput", "held_bytes", held, "B", dims)
    yield row("throughput", "peak_bytes", peak, "B", {**dims, "read": source})
    above = None if peak is None else peak - held
    if lane[0].startswith("no-document"):
        yield row("throughput", "step_bytes", above, "B", {**dims, "read": source})
        return
    kernel = "no-document-native" if ("no-document-native", None) in weights else None
    floor = FLOORS.get(lane[0], kernel or "no-document-folded")
    floor_held, floor_peak, _ = weights.get((floor, None), (0, None, ""))
    scratch = None
    if above is not None and floor_peak is not None:
        scratch = above - (floor_peak - floor_held)
    yield row("throughput", "scratch_bytes", scratch, "B", {**dims, "read": source})


def slopes(rows: Sequence[Row]) -> Iterator[Row]:
    """What one more agent adds, method by method: least squares over the numbers of agents.

    The interval is the slope's own, from its standard error; it needs three numbers of agents.
    """
    for metric, name, unit in FITTED:
        found: dict[tuple[Any, Any], list[Row]] = {}
        for one in rows:
            if one.metric == metric and one.value is not None:
                found.setdefault((one.dims["method"], one.dims["codec"]), []).append(one)
        for of_lane in found.values():
            if len(of_lane) > 1:
                dims = {k: v for k, v in of_lane[0].dims.items() if k != "n_agents"}
                yield row("scaling_in_agents", name, slope(of_lane), unit, dims)


def slope(rows: Sequence[Row]) -> Interval:
    """Change of the rows' value an agent."""
    fit = stats.linregress([one.dims["n_agents"] for one in rows], [one.value for one in rows])
    half = None
    if len(rows) > 2:
        half = fit.stderr * stats.t.ppf((1 + CONFIDENCE) / 2, len(rows) - 2)
    return Interval(
        value=float(fit.slope),
        lo=None if half is None else float(fit.slope - half),
        hi=None if half is None else float(fit.slope + half),
        n=len(rows),
    )
