"""One layer's attention again, over the tokens that an eviction kept.

When a single layer is evicted, what enters that layer does not change. So its output under any
policy and budget follows, exactly, from the queries, keys and values of one pass over the full
cache: no further pass of the model is needed.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from polykv_lib.kv import LayerKV

Parts = Float[Tensor, "head tail channel"]  # what each KV head adds to a layer's output


def tail_output(layer: LayerKV) -> Parts:
    """Attention of the last tokens, in fp32: query heads of a KV head side by side as channels.

    Args:
        layer: keys and values of the context's kept tokens (all heads keep equally many) and of
            the tail; queries of the tail alone (batch 1). The tail is causal to itself.
    """
    if layer.queries is None:
        raise ValueError("the observation holds no queries; pass LayerKV(queries=…).")
    _, n_heads, n_tokens, _ = layer.keys.shape
    queries = layer.queries[0].float().unflatten(0, (n_heads, -1))
    scores = queries @ layer.keys[0, :, None].float().mT * layer.softmax_scale
    n_tail = queries.shape[2]
    hidden = torch.ones(n_tail, n_tokens, dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(hidden.triu(n_tokens - n_tail + 1), -math.inf)
    out = scores.softmax(-1) @ layer.values[0, :, None].float()
    return out.transpose(1, 2).flatten(2)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far an evicted layer's output is from the full one."""

    error: float  # ||full - evicted||_F / ||full||_F over the tail's tokens
    head_errors: tuple[float, ...]  # the same, if only this KV head were evicted
    cosine: float  # mean over the tail's tokens


def compare(
    whole: Float[Tensor, "tail channel"], change: Float[Tensor, "head tail channel"]
) -> Difference:
    """Errors and cosine of a layer's output, which is the sum of its KV heads' parts.

    Args:
        whole: of the full cache.
        change: full minus evicted, by the head whose eviction makes it.
    """
    norm, together = whole.norm(), change.sum(0)
    return Difference(
        error=float(together.norm() / norm),
        head_errors=tuple((change.flatten(1).norm(dim=1) / norm).tolist()),
        cosine=float(functional.cosine_similarity(whole, whole - together, dim=-1).mean()),
    )
