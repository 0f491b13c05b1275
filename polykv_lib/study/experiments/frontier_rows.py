"""The numbers of the codec frontier: means over articles, and what each layer was given."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from polykv_lib.metrics.intervals import mean_interval
from polykv_lib.metrics.perplexity import delta_pct
from polykv_lib.study.experiments.common import row
from polykv_lib.study.record import Row

FULL_BITS = 16  # of one bf16 copy
Costs: TypeAlias = dict[str, dict[str, float]]  # bits a number, by side and option
Plan: TypeAlias = dict[str, list[str]]  # each layer's option, by side


@dataclass(frozen=True, kw_only=True)
class Score:
    """One passage under one codec."""

    article: str
    role: str  # "selection" or "report"
    codec: str
    bits: float
    kl: float  # nats a token
    nll_delta: float

    @property
    def sample(self) -> dict[str, Any]:
        """As it is stored."""
        return {k: round(v, 6) if isinstance(v, float) else v for k, v in asdict(self).items()}


def rows(
    scores: Sequence[Score], dims: Mapping[str, Any], *, seed: int, n_boot: int
) -> Iterator[Row]:
    """Means over the articles of each half and codec; passages are averaged inside an article."""
    ordered = sorted(scores, key=lambda s: (s.role, s.codec))
    for (role, codec), group in groupby(ordered, key=lambda s: (s.role, s.codec)):
        same = list(group)

        def mean(name: str, same: Sequence[Score] = same) -> Any:
            articles = dict.fromkeys(s.article for s in same)
            values = [
                float(np.mean([getattr(s, name) for s in same if s.article == title]))
                for title in articles
            ]
            return mean_interval(values, seed=seed, n_resamples=n_boot)

        own = {**dims, "codec": codec, "role": role}
        bits = mean("bits")
        yield row("frontier", "bits_per_element", bits, "bits", own)
        yield row("frontier", "memory_ratio", FULL_BITS / bits.value, "x", own, n=bits.n)
        yield row("frontier", "kl_nats", mean("kl"), "nats", own)
        yield row("frontier", "ppl_delta_pct", mean("nll_delta").mapped(delta_pct), "%", own)


def plan_rows(
    means: Mapping[str, Float[ndarray, "layer option"]],
    costs: Costs,
    plans: Mapping[str, Plan],
    dims: Mapping[str, Any],
) -> Iterator[Row]:
    """Each layer's single-layer KLs, and the codecs that the totals gave it."""
    for side, options in costs.items():
        for layer, of_layer in enumerate(means[side].tolist()):
            for name, kl in zip(options, of_layer, strict=True):
                own = {**dims, "layer": layer, "side": side, "option": name}
                yield row("single_layer", "kl_nats", kl, "nats", own)
        for codec, plan in plans.items():
            for layer, name in enumerate(plan[side]):
                own = {**dims, "codec": codec, "layer": layer, "side": side, "option": name}
                yield row("codec_plan", "bits", options[name], "bits", own)
