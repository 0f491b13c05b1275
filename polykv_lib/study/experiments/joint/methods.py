"""Ways to fill equal bytes, the joint plan among them; all are chosen on calibration items."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Final, Literal

import numpy as np

from polykv_lib import presets
from polykv_lib.calibration import EncodedItem, Measurements, Recipe, joint
from polykv_lib.calibration.joint import Codecs, Sizes, most_tokens
from polykv_lib.evict import FullKV, Plan
from polykv_lib.kv import Geometry
from polykv_lib.pool import SIZE_OF_ID, layers_nbytes, sizes_of
from polykv_lib.study.experiments.eviction.items import PlanFor, single
from polykv_lib.study.experiments.eviction.plans import paper_b
from polykv_lib.study.experiments.eviction.scores import Read, Result

JOINT: Final = "joint"
GAIN_CURVE: Final = "gain-curve"
SINGLE: Final = "best single"
ALONE: Final = "codec alone"


@dataclass(frozen=True, kw_only=True)
class ByteBudget:
    """So large a share of one bf16 copy of a document, whatever is stored in it."""

    share: float
    geometry: Geometry

    def total(self, n_tokens: int) -> int:
        """Bytes of all layers of a document's pool; its ids take the rest of the share."""
        return layers_nbytes(self.share, self.geometry, n_tokens)

    def sizes(self, codec: str, n_tokens: int) -> Sizes:
        """Bytes of a layer's heads in a codec."""
        return sizes_of(presets.codec(codec), n_tokens, self.geometry.head_dim)

    def nbytes(self, plan: Plan, n_tokens: int) -> int:
        """Bytes of all layers under a plan with codecs."""
        total = 0
        for layer in plan.layers:
            sizes = self.sizes(layer.codec or "full", n_tokens)
            if isinstance(layer.budget, int):
                total += sizes(self.geometry.n_kv_heads, min(layer.budget, n_tokens))
            else:
                total += sum(sizes(1, budget) for budget in layer.budget)
        return total

    def tokens(self, codec: str, n_tokens: int) -> int:
        """The most tokens a head that every layer can hold in a codec."""
        sizes = partial(self.sizes(codec, n_tokens), self.geometry.n_kv_heads)
        return most_tokens(sizes, self.total(n_tokens) // self.geometry.n_layers, n_tokens)

    def filled(self, plan: Plan, n_tokens: int) -> Plan:
        """The plan with a token more in its first layers, as many as the bytes still pay for."""
        layers, left = list(plan.layers), self.total(n_tokens) - self.nbytes(plan, n_tokens)
        for i, layer in enumerate(layers):
            if isinstance(layer.budget, int) and layer.budget < n_tokens:
                more = replace(layer, budget=layer.budget + 1)
                cost = self.nbytes(Plan(layers=(more,)), n_tokens) - self.nbytes(
                    Plan(layers=(layer,)), n_tokens
                )
                if cost <= left:
                    layers[i], left = more, left - cost
        return replace(plan, layers=tuple(layers))

    def stored(self, plan_for: PlanFor, codec: str) -> PlanFor:
        """A plan with one codec in every layer, filled up to the budget."""

        def plan(n_tokens: int) -> Plan:
            made = plan_for(n_tokens)
            layers = tuple(replace(own, codec=codec) for own in made.layers)
            return self.filled(replace(made, layers=layers), n_tokens)

        return plan


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One way to fill a budget."""

    share: float
    name: str
    codec: str  # of all layers, or "by layer"
    plan: PlanFor


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """What calibration items say of evicting and of storing each layer alone."""

    routed: Measurements  # under every policy, at every share
    gains: Measurements  # of the candidates
    codecs: Codecs
    level: Literal["layer", "head"]

    def planned(self, budget: ByteBudget, names: Sequence[str]) -> PlanFor:
        """The gain-curve plan in one codec, whose own loss decides nothing, or the joint plan."""
        free = np.zeros(budget.geometry.n_layers)

        def plan(n_tokens: int) -> Plan:
            return joint(
                self.gains,
                {name: self.codecs[name] if len(names) > 1 else free for name in names},
                {name: budget.sizes(name, n_tokens) for name in names},
                Recipe(level=self.level),
                n_heads=budget.geometry.n_kv_heads,
                n_tokens=n_tokens,
                total=budget.total(n_tokens),
            )

        return plan


def singles(budget: ByteBudget, policy: str, codecs: Sequence[str]) -> Iterator[Stored]:
    """One policy at uniform budgets, in each of these codecs."""
    for codec in codecs:
        kept = partial(budget.tokens, codec)
        plan = budget.stored(single(policy, kept, budget.geometry.n_layers), codec)
        yield Stored(share=budget.share, name=f"{SINGLE}, {codec}", codec=codec, plan=plan)


def alone(budget: ByteBudget, family: Sequence[str], shortest: int) -> Iterator[Stored]:
    """The first codec of a family that fits the shortest document whole; none may fit."""
    n_layers = budget.geometry.n_layers
    for codec in family:
        if budget.tokens(codec, shortest) == shortest:

            def plan(n_tokens: int, codec: str = codec) -> Plan:
                return budget.stored(lambda n: Plan.uniform(FullKV(), n, n_layers), codec)(n_tokens)

            yield Stored(share=budget.share, name=ALONE, codec=codec, plan=plan)
            return


def planned(
    budget: ByteBudget, known: Calibrated, fixed: Sequence[str], menu: Sequence[str]
) -> Iterator[Stored]:
    """Paper B's plans and ours in bf16, ours in each fixed codec, and the joint plan."""

    def of(name: str, codec: str, plan: PlanFor) -> Stored:
        return Stored(share=budget.share, name=name, codec=codec, plan=plan)

    routed = replace(known.routed, target=budget.share)
    for name, plan in paper_b(routed, known.gains, partial(budget.tokens, "full")).items():
        yield of(name, "full", budget.stored(plan, "full"))
    for codec in ("full", *fixed):
        yield of(f"{GAIN_CURVE}, {codec}", codec, known.planned(budget, [codec]))
    yield of(JOINT, "by layer", known.planned(budget, menu))


def scored(
    model: Any, item: EncodedItem, methods: Sequence[Stored], budgets: Mapping[float, ByteBudget]
) -> Iterator[Result]:
    """The item under every method; one prefill serves them all.

    Raises:
        RuntimeError: a pool's tensors take more bytes than its budget.
    """
    n_tokens = len(item.context_ids)
    plans = [method.plan(n_tokens) for method in methods]
    read = Read.of(model, item, plans)
    for method, plan, kept in zip(methods, plans, read.of_plans, strict=True):
        pool = read.pool(kept, *presets.of_plan(plan))
        result = read.result(pool, keep=method.share, method=method.name, codec=method.codec)
        most = budgets[method.share].total(n_tokens) + SIZE_OF_ID * n_tokens
        if result.pool_bytes > most:
            raise RuntimeError(
                f"{method.name} at {method.share} takes {result.pool_bytes} bytes of {item.id!r}, "
                f"more than its {most}."
            )
        yield result


def least(results: Sequence[Result], methods: Sequence[Stored]) -> Stored:
    """The method of least mean KL over families; ties go to the earlier one."""

    def macro(method: Stored) -> float:
        families: dict[str, list[float]] = {}
        for r in results:
            if (r.method, r.keep) == (method.name, method.share):
                families.setdefault(r.family, []).append(r.kl)
        return fmean(fmean(own) for own in families.values())

    return min(methods, key=macro)
