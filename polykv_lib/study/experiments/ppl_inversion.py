"""Does a compressed document make the model better or worse at what follows it?

Every document is prefilled once and compressed by every codec; the continuation is scored after
each pool and after the full cache, and differences are paired by document. A lossless pool must
agree with the plain cache, or the experiment stops.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib import hf
from polykv_lib.metrics.agreement import kl_nats, top1_agreement
from polykv_lib.metrics.intervals import mean_interval
from polykv_lib.metrics.perplexity import delta_pct, perplexity, token_nll
from polykv_lib.study.experiments.common import (
    Say,
    Timer,
    compressed,
    dtype_name,
    facts,
    row,
    settings,
)
from polykv_lib.study.experiments.excerpts import Excerpt, Protocol, excerpts
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome, Row

# Mean |difference| in nats a token that is rounding, by the dtype in which the model computes.
LOSSLESS_NATS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point. `frontier_codecs` join after `frontier_tokens` alone (0: nowhere)."""

    model: str
    seed: int
    protocols: Sequence[Protocol]
    prefix_tokens: Sequence[int]
    n_docs: int
    scored_tokens: int
    codecs: Sequence[str]
    frontier_codecs: Sequence[str]
    frontier_tokens: int
    n_boot: int

    @property
    def frontier_protocol(self) -> Protocol:
        """Where KL is shown against bits: with the same scored tokens, if there is the choice."""
        return "fixed-window" if "fixed-window" in self.protocols else self.protocols[0]

    def prefixes(self, protocol: Protocol) -> list[int]:
        """Prefix lengths of a protocol, ascending."""
        frontier = self.frontier_tokens if protocol == self.frontier_protocol else 0
        return sorted({*self.prefix_tokens, *([frontier] if frontier else [])})

    def codecs_of(self, excerpt: Excerpt) -> list[str]:
        """Codecs that compress this excerpt, each once."""
        at_frontier = self.is_frontier(excerpt)
        only_frontier = at_frontier and excerpt.n_prefix not in self.prefix_tokens
        names = [] if only_frontier else list(self.codecs)
        return list(dict.fromkeys(names + (list(self.frontier_codecs) if at_frontier else [])))

    def is_frontier(self, excerpt: Excerpt) -> bool:
        """Whether the excerpt belongs to the comparison of KL against bits."""
        return (excerpt.protocol, excerpt.n_prefix) == (
            self.frontier_protocol,
            self.frontier_tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Score:
    """One excerpt under one codec; NLL in nats, one number a scored token."""

    excerpt: Excerpt
    codec: str
    bits_per_element: float
    nll_full: Float[Tensor, " scored"]
    nll_pool: Float[Tensor, " scored"]
    nll_no_document: float
    kl: float
    top1: float

    @property
    def nll_delta(self) -> float:
        """Mean NLL after the pool minus after the full cache."""
        return (self.nll_pool - self.nll_full).mean().item()

    @property
    def setting(self) -> tuple[str, str, int, str]:
        """Everything but the document: what a mean is taken within."""
        return self.excerpt.protocol, self.excerpt.corpus, self.excerpt.n_prefix, self.codec


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Perplexity, KL and top-1 agreement of pools against the full cache.

    Raises:
        RuntimeError: The lossless pool does not reproduce the plain cache.
    """
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    opening = list(tokenizer("")["input_ids"])
    scores: list[Score] = []
    for protocol in point.protocols:
        chosen = excerpts(
            protocol,
            tokenizer,
            prefixes=point.prefixes(protocol),
            n_docs=point.n_docs,
            n_scored=point.scored_tokens,
            opening=opening,
        )
        for i, excerpt in enumerate(chosen):
            if not scores:
                check_lossless(model, excerpt, opening)
            scored = score(model, excerpt, point.codecs_of(excerpt), opening)
            scores += part(f"{protocol}-{i}", list, scored)
            say(
                f"{protocol}, excerpt {i + 1}: {excerpt.n_prefix:,} tokens of {excerpt.title}, "
                f"{timer.seconds:.0f} s"
            )
    return Outcome(
        rows=list(rows(scores, point, dtype_name(model))),
        samples=[_sample(score) for score in scores],
        protocol={
            **facts(model, tokenizer),
            "scored": "the continuation but its first token, which is fed; teacher-forced",
            "compressed": "the prefix; the continuation's own keys and values are exact",
            "special_tokens_before_the_prefix": opening,
            "chat_template": False,
            "truncation": "prefix and window are cut at token counts, mid-sentence",
            "lossless_tolerance_nats": LOSSLESS_NATS[model.dtype],
            "wikitext2": any(score.excerpt.corpus == "WikiText-2" for score in scores),
            "interval": f"percentile bootstrap over documents, {point.n_boot} resamples",
            "seconds": timer.seconds,
        },
    )


def check_lossless(model: Any, excerpt: Excerpt, opening: Sequence[int]) -> None:
    """The control: a pool in full precision gives the NLL of the plain cache.

    Raises:
        RuntimeError: It does not, so no number of this run would mean anything.
    """
    [lossless] = score(model, excerpt, ["full"], opening)
    error = (lossless.nll_pool - lossless.nll_full).abs().mean().item()
    allowed = LOSSLESS_NATS[model.dtype]
    if not error <= allowed:
        raise RuntimeError(
            f"a lossless pool changes the NLL of {excerpt.title!r} by {error:.2g} nats a token; in "
            f"{dtype_name(model)} at most {allowed:.0e} is rounding. The pool is not read exactly."
        )


def score(
    model: Any, excerpt: Excerpt, codecs: Iterable[str], opening: Sequence[int]
) -> Iterator[Score]:
    """The excerpt after each codec's pool, from one prefill."""
    layers = hf.read_document(model, excerpt.prefix)
    fed, targets = excerpt.window[:, :-1], excerpt.window[0, 1:].to(model.device)
    full = hf.logits(model, hf.full_cache(layers), fed, excerpt.n_prefix)[0]
    nll_full = token_nll(full, targets)
    alone = torch.cat((torch.tensor([opening], dtype=torch.int64), fed), dim=1)
    no_document = hf.logits(model, hf.full_cache([]), alone, 0)[0, len(opening) :]
    nll_no_document = token_nll(no_document, targets).mean().item()
    for codec in codecs:
        pool = compressed(model, layers, excerpt.prefix, codec)
        logits = hf.logits(model, pool.agent_cache(1), fed, excerpt.n_prefix)[0]
        yield Score(
            excerpt=excerpt,
            codec=codec,
            bits_per_element=pool.bits_per_element,
            nll_full=nll_full.cpu(),
            nll_pool=token_nll(logits, targets).cpu(),
            nll_no_document=nll_no_document,
            kl=kl_nats(full, logits).mean().item(),
            top1=top1_agreement(full, logits).float().mean().item(),
        )


def rows(scores: Iterable[Score], point: Settings, dtype: str) -> Iterator[Row]:
    """Means over the documents of each setting, and each document's own change of perplexity."""
    by_setting = groupby(sorted(scores, key=lambda s: s.setting), key=lambda s: s.setting)
    for (protocol, corpus, prefix_tokens, codec), group in by_setting:
        same = list(group)
        dims = {
            "protocol": protocol,
            "text": corpus,
            "prefix_tokens": prefix_tokens,
            "codec": codec,
            "model": point.model,
            "dtype": dtype,
        }
        means = {
            name: mean_interval([of(s) for s in same], seed=point.seed, n_resamples=point.n_boot)
            for name, of in _VALUES.items()
        }
        change = means["delta"].mapped(delta_pct)
        for metric, name in (
            ("ppl_full", "full"),
            ("ppl_pool", "pool"),
            ("ppl_no_document", "none"),
        ):
            yield row("ppl", metric, means[name].mapped(perplexity), "ppl", dims)
        yield row("ppl", "ppl_delta_pct", change, "%", dims)
        yield row("ppl", "nll_delta_nats", means["delta"], "nats", dims)
        yield row("ppl", "kl_nats", means["kl"], "nats", dims)
        yield row("ppl", "top1_agreement", means["top1"], "share", dims)
        for s in same:
            own = delta_pct(s.nll_delta)
            yield row("documents", "ppl_delta_pct", own, "%", dims | {"document": s.excerpt.title})
        if point.is_frontier(same[0].excerpt):
            yield row("kl_vs_bits", "bits_per_element", means["bits"], "bits", dims)
            yield row("kl_vs_bits", "kl_nats", means["kl"], "nats", dims)
            yield row("kl_vs_bits", "ppl_delta_pct", change, "%", dims)


_VALUES: dict[str, Callable[[Score], float]] = {
    "full": lambda s: s.nll_full.mean().item(),
    "pool": lambda s: s.nll_pool.mean().item(),
    "none": lambda s: s.nll_no_document,
    "delta": lambda s: s.nll_delta,
    "kl": lambda s: s.kl,
    "top1": lambda s: s.top1,
    "bits": lambda s: s.bits_per_element,
}


def _sample(score: Score) -> dict[str, Any]:
    return {
        "document": score.excerpt.title,
        "protocol": score.excerpt.protocol,
        "prefix_tokens": score.excerpt.n_prefix,
        "codec": score.codec,
        "n_tokens": len(score.nll_full),
        "nll_full": round(score.nll_full.mean().item(), 6),
        "nll_pool": round(score.nll_pool.mean().item(), 6),
        "kl": round(score.kl, 6),
        "top1": round(score.top1, 4),
    }
