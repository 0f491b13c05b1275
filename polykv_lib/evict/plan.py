"""A plan: each layer's own policy and budget, as a value that a person can read and edit."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from polykv_lib.evict.base import EvictionPolicy, keep
from polykv_lib.evict.cake import CAKE
from polykv_lib.evict.cam import CAM
from polykv_lib.evict.controls import FullKV, Guarded, Random
from polykv_lib.evict.d2o import D2O
from polykv_lib.evict.expected_attention import ExpectedAttention
from polykv_lib.evict.h2o import H2O
from polykv_lib.evict.key_norm import KeyNorm
from polykv_lib.evict.keydiff import KeyDiff
from polykv_lib.evict.merging import merged
from polykv_lib.evict.rank_merge import RankMerge
from polykv_lib.evict.scissorhands import Scissorhands
from polykv_lib.evict.snapkv import SnapKV
from polykv_lib.evict.streaming_llm import StreamingLLM
from polykv_lib.evict.tova import TOVA
from polykv_lib.evict.yaml_file import read_yaml
from polykv_lib.kv import KeptTokens, LayerKV

SCHEMA: Final = 1
# Each KV head's kept tokens, and the layer as a merging policy changes it (None: unchanged).
Evicted: TypeAlias = tuple[tuple[KeptTokens, ...], LayerKV | None]
POLICIES: Final[dict[str, type[EvictionPolicy]]] = {
    policy.__name__: policy
    for policy in (
        FullKV, StreamingLLM, H2O, TOVA, SnapKV, CAKE, CAM, D2O, Scissorhands, ExpectedAttention,
        KeyDiff, KeyNorm, Random, RankMerge, Guarded,
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What one layer keeps in one phase: tokens a head, or one number for each KV head.

    After the prefill that is so many tokens of the document; while generating, so many of the
    document's and the agent's own together, after every step. `codec` names how a pool stores them
    (`presets.of_plan`), where the plan says so.
    """

    policy: EvictionPolicy
    budget: int | tuple[int, ...]
    codec: str | None = None

    def __post_init__(self) -> None:
        numbers = self.budget if isinstance(self.budget, tuple) else (self.budget,)
        if not numbers or not all(isinstance(b, int) and b > 0 for b in numbers):
            raise ValueError(
                f"budget {self.budget!r}; pass tokens for each KV head, a whole number from 1, or "
                "a tuple with one a head."
            )
        if isinstance(self.policy, type) or not isinstance(self.policy, EvictionPolicy):
            raise ValueError(f"policy {self.policy!r}; pass a policy such as H2O() or SnapKV().")
        if self.codec is not None and not (isinstance(self.codec, str) and self.codec):
            raise ValueError(f"codec {self.codec!r}; pass a preset's name, or leave it out.")

    def budgets(self, n_heads: int) -> tuple[int, ...]:
        """Tokens of each KV head."""
        return (self.budget,) * n_heads if isinstance(self.budget, int) else self.budget

    def keep(self, layer: LayerKV) -> tuple[KeptTokens, ...]:
        """The tokens that each KV head keeps."""
        _, n_heads, n_tokens, _ = layer.keys.shape
        if isinstance(self.policy, FullKV):
            return keep(self.policy, layer, (n_tokens,) * n_heads)
        return keep(self.policy, layer, self.budgets(n_heads))

    def evict(self, layer: LayerKV) -> Evicted:
        """The kept tokens of each KV head, and the layer as a merging policy changes them."""
        kept = self.keep(layer)
        return kept, merged(self.policy, layer, kept)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One `LayerPlan` a layer, first layer first; applied once, before the first new token.

    `decode`, if given, is applied after every later step: see `hf.EvictingCache`.
    """

    layers: tuple[LayerPlan, ...]
    decode: tuple[LayerPlan, ...] | None = None

    def __post_init__(self) -> None:
        for phase, layers in (("", self.layers), ("decode ", self.decode or ())):
            if not isinstance(layers, Sequence):
                raise ValueError(
                    f"the {phase}plan is {layers!r}; pass a tuple, a LayerPlan a layer."
                )
            for i, layer in enumerate(layers):
                if not isinstance(layer, LayerPlan):
                    raise ValueError(
                        f"layer {i} of the {phase}plan is {layer!r}; pass a LayerPlan, which names "
                        "a policy and a budget. Plan.uniform(policy, budget, n_layers) makes them."
                    )

    @classmethod
    def uniform(cls, policy: EvictionPolicy, budget: int, n_layers: int) -> "Plan":
        """The same policy and budget (tokens for each KV head) in every layer."""
        return cls(layers=(LayerPlan(policy=policy, budget=budget),) * n_layers)

    @classmethod
    def of(cls, policy: EvictionPolicy, budgets: Sequence[int | tuple[int, ...]]) -> "Plan":
        """One policy, each layer with its own budget."""
        return cls(layers=tuple(LayerPlan(policy=policy, budget=b) for b in budgets))

    def decoding(
        self, policy: EvictionPolicy, budgets: int | Sequence[int | tuple[int, ...]]
    ) -> "Plan":
        """This plan with a decode phase: one policy, one budget or one for each layer."""
        each = (budgets,) * len(self.layers) if isinstance(budgets, int) else budgets
        return replace(self, decode=Plan.of(policy, each).layers)

    def total(self, n_heads: int) -> int:
        """Tokens of all layers and KV heads together, after the prefill: the budgets' sum.

        A layer of FullKV counts by its budget, though it keeps the whole document.
        """
        return sum(sum(layer.budgets(n_heads)) for layer in self.layers)

    def check(self, n_layers: int, n_heads: int) -> None:
        """Refuse a plan that was made for another model.

        Raises:
            ValueError: the number of layers, or of KV heads, is not the model's.
        """
        for phase, layers in self._phases():
            if len(layers) != n_layers:
                raise ValueError(
                    f"the {phase}plan has {len(layers)} layers, the model {n_layers}; "
                    "a plan belongs to the model it was made for."
                )
            for i, layer in enumerate(layers):
                if len(layer.budgets(n_heads)) != n_heads:
                    raise ValueError(
                        f"layer {i} of the {phase}plan has {len(layer.budgets(n_heads))} budgets, "
                        f"but the model has {n_heads} KV heads; give one number, or one for each "
                        "head."
                    )

    def phases_of(self, layer: int) -> tuple[LayerPlan, ...]:
        """What a layer keeps at prefill, and while generating if the plan says so."""
        return tuple(layers[layer] for _, layers in self._phases())

    def _phases(self) -> list[tuple[str, tuple[LayerPlan, ...]]]:
        later = [] if self.decode is None else [("decode ", self.decode)]
        return [("", self.layers), *later]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as YAML, one line a layer; returns the path."""
        lines = [f"schema: {SCHEMA}", "prefill:", *map(_line, self.layers)]
        if self.decode is not None:
            lines += ["decode:", *map(_line, self.decode)]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan that `save` wrote or a person edited.

        Raises:
            ValueError: not YAML, a key that stands twice, a newer schema, an unknown policy or
                argument, or a bad budget.
        """
        content = read_yaml(path)
        if not isinstance(content, dict) or not isinstance(content.get("prefill"), list):
            raise ValueError(
                f"{path} is no plan: it needs `prefill:`, a list with an entry a layer."
            )
        if unknown := [name for name in content if name not in ("schema", "prefill", "decode")]:
            raise ValueError(f"{path} has {unknown[0]!r}; a plan has schema, prefill and decode.")
        schema = content.get("schema", SCHEMA)
        if not isinstance(schema, int) or schema > SCHEMA:
            raise ValueError(f"{path} has schema {schema!r}, this version reads {SCHEMA}.")
        decode = content.get("decode")
        if decode is not None and not isinstance(decode, list):
            raise ValueError(f"{path}: `decode:` is a list with an entry a layer, or left out.")
        return cls(
            layers=_layers(content["prefill"], f"{path}, "),
            decode=None if decode is None else _layers(decode, f"{path}, decode, "),
        )


def _line(layer: LayerPlan) -> str:
    entry = _to_dict(layer.policy) | {"budget": _plain(layer.budget)}
    if layer.codec is not None:
        entry["codec"] = layer.codec
    return "- " + yaml.safe_dump(entry, default_flow_style=True, width=10_000).strip()


def _layers(entries: list[Any], where: str) -> tuple[LayerPlan, ...]:
    return tuple(_layer(entry, f"{where}layer {i}") for i, entry in enumerate(entries))


def _plain(budget: int | tuple[int, ...]) -> int | list[int]:
    return budget if isinstance(budget, int) else list(budget)


def _to_dict(policy: EvictionPolicy) -> dict[str, Any]:
    values = {f.name: getattr(policy, f.name) for f in fields(policy)}  # type: ignore[arg-type]
    nested = {k: _to_dict(v) if isinstance(v, EvictionPolicy) else v for k, v in values.items()}
    return {"policy": type(policy).__name__, **nested}


def _layer(entry: Any, where: str) -> LayerPlan:
    if not isinstance(entry, dict) or "budget" not in entry:
        raise ValueError(f"{where}: an entry needs `policy` and `budget`, got {entry!r}.")
    budget = entry["budget"]
    if not isinstance(budget, int | list):
        raise ValueError(f"{where}: budget {budget!r}; pass tokens, or a list with one a KV head.")
    described = {k: v for k, v in entry.items() if k not in ("budget", "codec")}
    try:
        return LayerPlan(
            policy=_policy(described),
            budget=tuple(budget) if isinstance(budget, list) else budget,
            codec=entry.get("codec"),
        )
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _policy(description: Mapping[str, Any]) -> EvictionPolicy:
    """The policy that {"policy": its name, argument: value, …} describes; policies may nest."""
    arguments = dict(description)
    name = arguments.pop("policy", None)
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"no policy {name!r}; choose one of: {', '.join(POLICIES)}.")
    nested = {k: _policy(v) if isinstance(v, dict) else v for k, v in arguments.items()}
    try:
        return POLICIES[name](**nested)
    except TypeError as error:
        known = ", ".join(f.name for f in fields(POLICIES[name])) or "none"  # type: ignore[arg-type]
        raise ValueError(f"{name} takes {known}; got {', '.join(map(str, nested))}.") from error
