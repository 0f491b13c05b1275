"""The attention function registered with transformers under the name "polykv"."""

from typing import Any, Final

from jaxtyping import Bool, Float
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from polykv_lib.attend import attend
from polykv_lib.hf import compat
from polykv_lib.hf.caches import AgentLayer
from polykv_lib.hf.evicting_layer import EvictingLayer
from polykv_lib.hf.generation_checks import check_generation
from polykv_lib.hf.observe import ObservedLayer, changed

NAME: Final = "polykv"


def prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Register the attention "polykv" and set it on the model; idempotent; returns the model.

    A prepared model without one of our caches computes what it did before, through sdpa. A model
    that was unpickled is prepared again.

    Raises:
        ValueError: an encoder-decoder model, one without transformers' attention interface, or one
            with layers that hold no keys and values.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{model.config.model_type} is an encoder-decoder model; a pool shares the cache of a "
            "decoder-only model, such as smollm2-135m."
        )
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        raise ValueError(
            f"{model.config.model_type} caps its attention scores (softcap), which a pool can not "
            "do. Use a model without, such as Llama, Qwen, Mistral or Gemma 3."
        )
    compat.attention_window(model)  # refuses kinds of layers
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{model.config.model_type} does not use transformers' attention interface, so it can "
            "not read a pool. Use a model that does, such as Llama, Qwen, Mistral or Phi-3."
        )
    model.set_attn_implementation(NAME)
    check_generation(model)
    return model


def attention(
    module: Any,
    query: Float[Tensor, "agent q_head query dim"],
    key: Float[Tensor, "agent head own dim"],
    value: Float[Tensor, "agent head own dim"],
    attention_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "agent query q_head dim"], None]:
    """Softmax over [shared document | own suffix]; plain sdpa where the keys carry no handle.

    The document's part needs no mask: every agent sees all of it. The two parts merge by their
    log-sum-exp, so no agent ever holds a copy of the document. A layer that evicts (EvictingLayer)
    attends to what it holds.
    """
    observer: ObservedLayer | None = getattr(key, "polykv_observer", None)
    layer: AgentLayer | EvictingLayer | None = getattr(key, "polykv_layer", None)
    if observer is not None or layer is not None:
        _check(module, kwargs)
    if observer is not None:
        _check_values(module, value, "polykv_observer", observer)
        observer.after_attention(query, scaling)
    if layer is None:
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out, None
    if not isinstance(layer, AgentLayer):
        out = layer.attend(
            module, query, key, value, attention_mask, scaling, dropout=dropout, **kwargs
        )
        return out, None
    if query.requires_grad:
        raise ValueError("a pool is read without gradients; call the model under torch.no_grad().")
    _check_values(module, value, "polykv_layer", layer)
    layer.unread = False
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shared = layer.shared
    mask = layer.masks.rows(attention_mask, query.shape[1] // shared.n_heads, query.dtype)
    found = shared.step(query, key, value, scale, mask)
    if found is not None:
        return found, None
    own = attend(query, key, value, scale, mask)
    out, _ = shared.attend(query, scale, own) if shared.pieces else own
    return out.to(query.dtype).transpose(1, 2).contiguous(), None


def _check(module: Any, options: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} uses {name} in its attention, which a pool can not do."
            )


def _check_values(module: Any, value: Any, name: str, handle: object) -> None:
    """Values must be those that the cache returned: a pool stores what it was given."""
    if getattr(value, name, None) is not handle:
        raise changed(type(module).__name__, "values")
