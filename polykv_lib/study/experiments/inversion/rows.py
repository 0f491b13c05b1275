"""What the passages' scores say together: means over articles, and what noise would give."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from scipy.stats import binomtest

from polykv_lib.metrics.intervals import Interval, mean_interval
from polykv_lib.metrics.perplexity import delta_pct
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.inversion.attention_shape import AttentionShape
from polykv_lib.study.record import Row

DISTANCES = (0, 16, 32, 64, 128, 256, 512)  # edges of the bins, in tokens after the document
SHAPES = {"entropy": "nats", "sink_mass": "share", "document_mass": "share"}


@dataclass(frozen=True, kw_only=True)
class Score:
    """One passage under one control, all seeds: what reading the changed document costs."""

    article: str
    passage: int
    n_prefix: int
    control: str
    nll_delta: Float[ndarray, "seed scored"]  # nats
    kl: Float[ndarray, " seed"]  # nats a token
    shape: AttentionShape | None  # of the first seed's attention, at the controls' length
    shape_full: AttentionShape | None


def rows(
    scores: Sequence[Score], *, model: str, dtype: str, seed: int, n_boot: int
) -> Iterator[Row]:
    """Means over the articles of each setting, and what symmetric noise would have given."""

    def interval(of: Callable[[Score], float], same: Sequence[Score]) -> Interval:
        return mean_interval(by_article(of, same), seed=seed, n_resamples=n_boot)

    ordered = sorted(scores, key=lambda s: (s.n_prefix, s.control))
    for (n_prefix, name), group in groupby(ordered, key=lambda s: (s.n_prefix, s.control)):
        same = list(group)
        dims = {"control": name, "prefix_tokens": n_prefix, "model": model, "dtype": dtype}
        delta = interval(lambda s: s.nll_delta.mean(), same)
        yield row("controls", "nll_delta_nats", delta, "nats", dims)
        yield row("controls", "ppl_delta_pct", delta.mapped(delta_pct), "%", dims)
        yield row("controls", "kl_nats", interval(lambda s: s.kl.mean(), same), "nats", dims)
        for metric, value, unit, n in _signs(same):
            yield row("controls", metric, value, unit, dims, n=n)
        for low, high in pairwise(DISTANCES):
            if high <= same[0].nll_delta.shape[1]:
                near = interval(_between(low, high), same)
                own = dims | {"distance": f"{low + 1} to {high}"}
                yield row("distance", "ppl_delta_pct", near.mapped(delta_pct), "%", own)
        if same[0].shape is not None:
            for metric, unit in SHAPES.items():
                for suffix, of in (("", _shape(metric)), ("_change", _change(metric))):
                    yield row("attention", metric + suffix, interval(of, same), unit, dims)


def by_article(of: Callable[[Score], float], same: Sequence[Score]) -> list[float]:
    """Mean over an article's passages, one number an article."""
    articles = dict.fromkeys(score.article for score in same)
    return [float(np.mean([of(s) for s in same if s.article == title])) for title in articles]


def _signs(same: Sequence[Score]) -> Iterator[tuple[str, float, str, int]]:
    """Signs of the change, and its spread over seeds and over articles."""
    runs = np.concatenate([s.nll_delta.mean(1) for s in same])
    means = np.array(by_article(lambda s: s.nll_delta.mean(), same))
    negative = int((means < 0).sum())
    yield "negative_articles", negative / len(means), "share", len(means)
    yield "sign_test_p", float(binomtest(negative, len(means)).pvalue), "p", len(means)
    yield "negative_runs", float((runs < 0).mean()), "share", len(runs)
    yield "article_sd_pct", 100 * float(means.std(ddof=len(means) > 1)), "%", len(means)
    by_seed = np.stack([s.nll_delta.mean(1) for s in same])
    if by_seed.shape[1] > 1:
        alike = np.abs(np.sign(by_seed).sum(1)) == by_seed.shape[1]
        yield "seeds_alike", float(alike.mean()), "share", len(same)
        yield "seeds_alike_by_chance", 2.0 ** (1 - by_seed.shape[1]), "share", by_seed.shape[1]
        yield "seed_sd_pct", 100 * float(by_seed.std(1, ddof=1).mean()), "%", len(same)


def _between(low: int, high: int) -> Callable[[Score], float]:
    return lambda s: s.nll_delta[:, low:high].mean()


def _shape(metric: str) -> Callable[[Score], float]:
    return lambda s: getattr(s.shape, metric)


def _change(metric: str) -> Callable[[Score], float]:
    return lambda s: getattr(s.shape, metric) - getattr(s.shape_full, metric)
