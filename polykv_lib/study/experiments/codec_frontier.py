"""What the fewest bits are that keep the answers of the full cache.

Articles part into two halves. On the selection half every candidate is scored, and each layer's
keys and values are stored alone by each optional codec: the single-layer KLs, added up, are
minimised under totals of bytes, which gives every layer codecs of its own. On the report half all
of them are scored again, as pools read from their packed codes; nothing is chosen there.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy import ndarray
from torch import Tensor

from polykv_lib import hf, presets
from polykv_lib.calibration import EncodedItem
from polykv_lib.calibration.bits import choose_codecs
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.agreement import kl_nats
from polykv_lib.metrics.perplexity import token_nll
from polykv_lib.pool import Side
from polykv_lib.pool.freeze import pieces_of
from polykv_lib.quantize import FullPrecision
from polykv_lib.study.experiments.common import Say, Timer, dtype_name, facts, settings
from polykv_lib.study.experiments.excerpts import passages
from polykv_lib.study.experiments.frontier_rows import Costs, Plan, Score, plan_rows, rows
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome

PLAIN: Final[dict[str, Side]] = {"keys": FullPrecision(), "values": FullPrecision()}
Single = Float[ndarray, "layer option"]  # KL of one layer's side stored alone, nats a token


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point; every second passage selects, the others report."""

    model: str
    seed: int
    prefix_tokens: int
    n_passages: int
    scored_tokens: int
    codecs: Sequence[str]
    key_options: Sequence[str]
    value_options: Sequence[str]
    budgets: Sequence[int | float]
    n_boot: int

    @property
    def sides(self) -> dict[str, dict[str, Side]]:
        """The codecs that a layer may get for its keys, and for its values, by name."""
        return {
            "keys": {name: presets.KEYS[name] for name in self.key_options},
            "values": {name: presets.VALUES[name] for name in self.value_options},
        }


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A document and the window that is scored after it."""

    article: str
    ids: Int[Tensor, "1 token"]
    window: Int[Tensor, " window"]

    @property
    def item(self) -> EncodedItem:
        """The same as the passes of a calibration take it."""
        fed, *answer = self.window.tolist()
        context = tuple(self.ids[0].tolist())
        return EncodedItem(
            id=self.article,
            family="text",
            context_ids=context,
            question_ids=(fed,),
            answer_ids=tuple(answer),
        )


class Read(NamedTuple):
    """What a passage says; of single layers and their codecs in the selection half alone."""

    scores: list[Score]
    singles: dict[str, Single]
    costs: Costs


Named = dict[str, tuple[Any, Any, int]]  # key codecs, value codecs, sinks


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Bits, KL and perplexity change of every candidate, on each half; the layers' own codecs."""
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    opening = torch.tensor(tokenizer("")["input_ids"], dtype=torch.int64)
    n_read = point.prefix_tokens - len(opening)
    n_tokens = n_read + point.scored_tokens + 1
    texts = list(passages(tokenizer, n_passages=point.n_passages, n_tokens=n_tokens))
    chosen = {name: presets.codec(name) for name in point.codecs}
    uniform: Named = {n: (c.keys, c.values, c.n_sink) for n, c in chosen.items()}
    read: dict[str, list[Read]] = {"selection": [], "report": []}
    plans: dict[str, Plan] = {}
    for role, half in (("selection", texts[1::2]), ("report", texts[::2])):
        by_layer = {name: _codecs(plan, point) for name, plan in plans.items()}
        for i, (text, ids) in enumerate(half):
            document = torch.cat((opening, ids[:n_read]))[None]
            passage = Passage(article=text.title, ids=document, window=ids[n_read:])
            named = uniform | by_layer
            read[role].append(part(f"{role}-{i}", _read, model, passage, role, named, point))
            say(f"{role} {i + 1} of {len(half)}, {text.title}, {timer.seconds:.0f} s")
        if role == "selection":
            means = {
                side: np.mean([own.singles[side] for own in read[role]], axis=0)
                for side in point.sides
            }
            costs = read[role][0].costs
            plans = {f"by layer, {b:g} bits": _plan(means, costs, b) for b in point.budgets}
    scores = [score for half in read.values() for own in half for score in own.scores]
    dims = {"model": point.model, "prefix_tokens": point.prefix_tokens, "dtype": dtype_name(model)}
    return Outcome(
        rows=[
            *rows(scores, dims, seed=point.seed, n_boot=point.n_boot),
            *plan_rows(means, costs, plans, dims),
        ],
        samples=[score.sample for score in scores],
        protocol={
            **facts(model, tokenizer),
            "articles_of_selection": [text.title for text, _ in texts[1::2]],
            "articles_of_report": [text.title for text, _ in texts[::2]],
            "bits": "every stored byte of keys and values, protected tokens in the model's dtype",
            "seconds": timer.seconds,
        },
    )


def _read(model: Any, passage: Passage, role: str, named: Named, point: Settings) -> Read:
    layers = hf.read_document(model, passage.ids)
    scores = list(_scores(model, passage, layers, role, named))
    if role == "report":
        return Read(scores, {}, {})
    return Read(scores, _single_layer(model, passage, layers, point), _costs(layers[0], point))


def _scores(
    model: Any, passage: Passage, layers: Sequence[LayerKV], role: str, named: Named
) -> Iterator[Score]:
    """The passage after each codec's pool."""
    n_prefix = passage.ids.shape[1]
    fed, targets = passage.window[None, :-1], passage.window[1:].to(model.device)
    full = hf.logits(model, hf.full_cache(layers), fed, n_prefix)[0]
    nll_full = token_nll(full, targets)
    for name, (keys, values, n_sink) in named.items():
        pool = hf.share(model, layers, passage.ids, keys=keys, values=values, n_sink=n_sink)
        logits = hf.logits(model, pool.agent_cache(1), fed, n_prefix)[0]
        yield Score(
            article=passage.article,
            role=role,
            codec=name,
            bits=pool.bits_per_element,
            kl=kl_nats(full, logits).mean().item(),
            nll_delta=(token_nll(logits, targets) - nll_full).mean().item(),
        )


def _single_layer(
    model: Any, passage: Passage, layers: Sequence[LayerKV], point: Settings
) -> dict[str, Single]:
    """KL of the window with one layer's keys (or values) stored by each option, the rest full."""
    found = {}
    for side, options in point.sides.items():
        changed = (
            [
                hf.read_back(layer, **PLAIN | {side: codec}, n_sink=presets.N_SINK)
                for codec in options.values()
            ]
            for layer in layers
        )
        found[side] = hf.kl_of_each(model, passage.item, layers, changed)
    return found


def _costs(layer: LayerKV, point: Settings) -> Costs:
    """Bits a number of every option, counted from a layer that is stored so, without its sinks."""

    def bits(side: str, codec: Side) -> float:
        stored = PLAIN | {side: codec}
        pieces = list(pieces_of(layer, stored["keys"], stored["values"], presets.N_SINK, None))
        pieces = pieces[1:] or pieces  # without the sinks, which nothing quantised does not have
        held = [getattr(piece, side).data.nbytes for piece in pieces]
        placed = [piece.where.nbytes for piece in pieces if piece.where is not None]
        n_tokens = sum(piece.n_tokens for piece in pieces)
        return 8 * sum(held + placed) / layer.keys[:, :, :n_tokens].numel()

    return {
        side: {name: bits(side, codec) for name, codec in options.items()}
        for side, options in point.sides.items()
    }


def _plan(means: Mapping[str, Single], costs: Costs, bits: int | float) -> Plan:
    """Each layer's options at a mean of `bits` a number, protected tokens not counted."""
    unit = 1_000  # of a bit: budgets are whole numbers
    units = [
        [(round(unit * cost), kl) for cost, kl in zip(options.values(), of_layer, strict=True)]
        for side, options in costs.items()
        for of_layer in means[side].tolist()
    ]
    picked = iter(choose_codecs(units, int(unit * bits * len(units))))
    return {
        side: [list(options)[next(picked)] for _ in means[side]] for side, options in costs.items()
    }


def _codecs(plan: Plan, point: Settings) -> tuple[list[Side], list[Side], int]:
    keys, values = ([point.sides[side][name] for name in plan[side]] for side in plan)
    return keys, values, presets.N_SINK
