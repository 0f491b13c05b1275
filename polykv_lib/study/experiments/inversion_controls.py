"""Is a lower perplexity under a compressed document an effect, or the sign of noise?

The same tokens are scored after several lengths of the text before them, read in full and through
the published codec with the signs of several seeds. At one length, controls take the codec apart:
keys or values alone, Gaussian noise of the same energy, shrinkage alone, matched norms, protected
sinks, and a softmax temperature as a regulariser that is one. Seeds and passages are averaged
inside an article; intervals resample articles.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from polykv_lib import hf
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.study.experiments.common import (
    Document,
    Say,
    Timer,
    compressed,
    dtype_name,
    facts,
    settings,
)
from polykv_lib.study.experiments.excerpts import passages
from polykv_lib.study.experiments.inversion.controls import PAPER, Control, control
from polykv_lib.study.experiments.inversion.readings import Draw, readings
from polykv_lib.study.experiments.inversion.rows import Score, rows
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome

LOSSLESS_NATS = 1e-4  # mean |difference| a token between a pool and the same codec's round trip


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point; the controls join at `control_tokens`, the codec at every length."""

    model: str
    seed: int
    prefix_tokens: Sequence[int]
    control_tokens: int
    controls: Sequence[str]
    n_passages: int
    scored_tokens: int
    n_seeds: int
    n_boot: int

    def names(self, n_prefix: int) -> list[str]:
        """Controls at a length, the published codec first."""
        rest = self.controls if n_prefix == self.control_tokens else ()
        return list(dict.fromkeys([PAPER, *rest]))

    def draws(self, name: str, n_prefix: int) -> list[Draw]:
        """A control with every seed, or once if a seed changes nothing.

        At the length of the controls the first seed's attention is looked at.
        """
        chosen, watched = control(name), n_prefix == self.control_tokens
        return [
            Draw(control=chosen, seed=self.seed + i, watched=watched and i == 0)
            for i in range(self.n_seeds if chosen.seeded else 1)
        ]

    @property
    def lengths(self) -> list[int]:
        """Every prefix length, ascending."""
        return sorted({*self.prefix_tokens, self.control_tokens})


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Perplexity change and KL of every control, with the numbers that decide.

    Raises:
        RuntimeError: A codec's round trip in an ordinary cache is not what its pool reads.
    """
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    opening = list(tokenizer("")["input_ids"])
    longest = max(point.lengths) - len(opening)
    chosen = passages(
        tokenizer, n_passages=point.n_passages, n_tokens=longest + point.scored_tokens + 1
    )
    scores: list[Score] = []
    for i, passage in enumerate(chosen):
        scores += part(f"passage-{i}", list, _scores(model, opening, *passage, i, point))
        say(f"passage {i + 1} of {point.n_passages}, {passage[0].title}, {timer.seconds:.0f} s")
    return Outcome(
        rows=list(
            rows(
                scores,
                model=point.model,
                dtype=dtype_name(model),
                seed=point.seed,
                n_boot=point.n_boot,
            )
        ),
        samples=[_sample(score) for score in scores],
        protocol={
            **facts(model, tokenizer),
            "scored": "the continuation but its first token, which is fed; teacher-forced",
            "changed": "the document's keys and values in an ordinary cache; the rest is exact",
            "special_tokens_before_the_prefix": opening,
            "articles": len({score.article for score in scores}),
            "interval": "percentile bootstrap over articles; seeds and passages averaged inside",
            "seconds": timer.seconds,
        },
    )


def _scores(
    model: Any,
    opening: Sequence[int],
    text: Document,
    ids: Int[Tensor, " token"],
    passage: int,
    point: Settings,
) -> Iterator[Score]:
    """One passage at every length; the first one shows that the codec is what a pool reads."""
    longest = max(point.lengths) - len(opening)
    prefix, window = ids[:longest], ids[None, longest:]
    for n_prefix in point.lengths:
        own = prefix[longest + len(opening) - n_prefix :]
        document = torch.cat((torch.tensor(opening, dtype=torch.int64), own))[None]
        layers = hf.read_document(model, document)
        if passage == 0 and n_prefix == min(point.lengths):
            check_round_trip(model, layers, document, window)
        yield from _score(model, layers, window, n_prefix, point, text.title, passage)


def check_round_trip(
    model: Any,
    layers: Sequence[LayerKV],
    document: Int[Tensor, "1 token"],
    window: Int[Tensor, "1 window"],
) -> None:
    """The control: tensors read back by the published codec give the NLL of its pool.

    Raises:
        RuntimeError: They do not, so the controls would not take the pool's codec apart.
    """
    n_prefix, targets = document.shape[1], window[0, 1:].to(model.device)
    pool = compressed(model, layers, document, "paper")
    trip = hf.full_cache(control("paper-plain").apply(layers, 0))
    nll = [
        token_nll(hf.logits(model, cache, window[:, :-1], n_prefix)[0], targets)
        for cache in (pool.agent_cache(1), trip)
    ]
    error = (nll[0] - nll[1]).abs().mean().item()
    if model.dtype == torch.float32 and not error <= LOSSLESS_NATS:
        raise RuntimeError(
            f"the pool and its codec's round trip differ by {error:.2g} nats a token; at most "
            f"{LOSSLESS_NATS:.0e} is rounding. The controls do not describe the pool."
        )


def _score(
    model: Any,
    layers: Sequence[LayerKV],
    window: Int[Tensor, "1 window"],
    n_prefix: int,
    point: Settings,
    article: str,
    passage: int,
) -> Iterator[Score]:
    """One document under every control of its length."""
    draws = {name: point.draws(name, n_prefix) for name in point.names(n_prefix)}
    plain = Draw(control=Control(label="as it is"), seed=0, watched=draws[PAPER][0].watched)
    read = readings(model, layers, window, [plain, *chain.from_iterable(draws.values())])
    full = next(read)
    for name, own in draws.items():
        drawn = list(islice(read, len(own)))
        yield Score(
            article=article,
            passage=passage,
            n_prefix=n_prefix,
            control=name,
            nll_delta=np.stack([(reading.nll - full.nll).numpy() for reading in drawn]),
            kl=np.array([reading.kl for reading in drawn]),
            shape=drawn[0].shape,
            shape_full=full.shape,
        )


def _sample(score: Score) -> dict[str, Any]:
    return {
        "article": score.article,
        "passage": score.passage,
        "prefix_tokens": score.n_prefix,
        "control": score.control,
        "nll_delta": [round(x, 6) for x in score.nll_delta.mean(1).tolist()],
        "kl": [round(x, 6) for x in score.kl.tolist()],
    }
