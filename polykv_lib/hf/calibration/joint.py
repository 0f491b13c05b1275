"""A few texts -> a plan of tokens and codecs under one total of bytes: `calibrate_joint`."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polykv_lib.calibration import EncodedItem, Recipe, joint
from polykv_lib.evict import EvictionPolicy, Plan
from polykv_lib.hf.calibration.calibrating import CANDIDATES, check, measure, points_for
from polykv_lib.hf.calibration.items import items_of
from polykv_lib.hf.calibration.stored_alone import codec_kl
from polykv_lib.hf.models.footprint import geometry_of
from polykv_lib.pool import layers_nbytes, shared_sinks, sizes_of


def calibrate_joint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str | EncodedItem],
    *,
    share: int | float,
    codecs: Mapping[str, Any],
    n_tokens: int | None = None,
    level: Literal["layer", "head"] = "layer",
    policies: Sequence[EvictionPolicy] = CANDIDATES,
    say: Callable[[str], None] | None = None,
) -> Plan:
    """Each layer's policy, tokens and codec, so that a pool takes a share of one bf16 copy.

    `calibrate` and the KL of each layer stored alone by each codec, put together by
    `calibration.joint`; what is said of texts there holds here. `presets.of_plan` turns the plan
    into `build_pool`'s keys, values and sinks.

    Args:
        model: any supported model; prepared here if it was not.
        tokenizer: of the model, for the plain texts.
        texts: items, or plain texts that are continued.
        share: bytes of the pool, over those of one bf16 copy of the document; what is not
            quantised is counted in bf16, whatever the model's dtype.
        codecs: what a layer may get, by the names of `presets.codec`; all leave the same first
            tokens in full precision.
        n_tokens: length of the documents that the plan is for; the items' mean unless given.
        level: budgets for layers, or for each KV head; a layer has one codec.
        policies: the candidates.
        say: told about progress and time left.

    Raises:
        ValueError: no text or codec, codecs that disagree about the first tokens, a share that is
            none, or one too small for any codec.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share!r} of one bf16 copy; pass a number between 0 and 1.")
    if not isinstance(codecs, Mapping) or not codecs:
        raise ValueError(
            f"codecs={codecs!r}; pass at least one to choose from, by its name: {{name: "
            "presets.codec(name)}."
        )
    shared_sinks(codecs.values())
    items, geometry = items_of(tokenizer, texts), geometry_of(model.config)
    length = round(fmean(len(i.context_ids) for i in items)) if n_tokens is None else n_tokens
    check(share, length, policies)
    measured = measure(
        model, items, target=share, policies=policies, fractions=points_for(share), say=say
    )
    return joint(
        measured,
        codec_kl(model, items, codecs, say),
        {n: sizes_of(c, length, geometry.head_dim) for n, c in codecs.items()},
        Recipe(level=level),
        n_heads=geometry.n_kv_heads,
        n_tokens=length,
        total=layers_nbytes(share, geometry, length),
    )
