"""Attention of each agent over tokens that it holds itself."""

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LN2: Final = math.log(2)


@dataclass(frozen=True)
class RowMask:
    """Which tokens each row sees, as the kernels take it; made once, used in every layer."""

    visible: Bool[Tensor, "#agent one row token"]
    bias: Float[Tensor, "#agent one row token"]  # 0 where visible, -inf elsewhere
    dead: Bool[Tensor, "#agent one row"] | None  # rows that see nothing; None: there is none


def row_mask(
    mask: Bool[Tensor, "#agent #one query token"], groups: int, dtype: torch.dtype
) -> RowMask:
    """The mask of queries as one of rows: `groups` query heads read one KV head."""
    visible = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    bias = torch.zeros(visible.shape, dtype=dtype, device=mask.device)
    dead = ~visible.any(-1)
    return RowMask(
        visible=visible,
        bias=bias.masked_fill_(~visible, -math.inf),
        dead=dead if dead.any() else None,
    )


def causal(queries: int, n_tokens: int, device: torch.device) -> Bool[Tensor, "1 1 query token"]:
    """The mask of the newest `queries` of `n_tokens` tokens."""
    full = torch.ones(queries, n_tokens, dtype=torch.bool, device=device)
    return full.tril(n_tokens - queries)[None, None]


def attend(
    q: Float[Tensor, "agent q_head query dim"],
    k: Float[Tensor, "agent head token dim"],
    v: Float[Tensor, "agent head token dim"],
    scale: float,
    mask: Bool[Tensor, "#agent #one query token"] | RowMask | None = None,
) -> tuple[Float[Tensor, "agent q_head query dim"], Float[Tensor, "agent q_head query"]]:
    """Attention of each agent over its own tokens: out and lse in fp32.

    Without a mask the last `query` tokens are the queries' own and attention is causal. A query
    that sees nothing (a padded row) has out = 0 and lse = -inf.

    The query heads of a KV head go in as rows: at one query an agent the CPU kernel's own handling
    of grouped heads is several times slower.
    """
    agents, q_heads, queries, dim = q.shape
    n_heads, n_tokens = k.shape[1:3]
    if mask is None and queries > 1:
        mask = causal(queries, n_tokens, q.device)
    if isinstance(mask, Tensor):
        mask = row_mask(mask, q_heads // n_heads, q.dtype)
    folded = q.reshape(agents, n_heads, -1, dim)
    if q.device.type == "cpu":
        out, lse = _attend_cpu(folded, k, v, scale, mask)
    else:
        out, lse = attend_plain(folded, k, v, scale, None if mask is None else mask.visible)
    return out.reshape(agents, q_heads, queries, dim), lse.reshape(agents, q_heads, queries)


def attend_plain(
    q: Float[Tensor, "agent head row dim"],
    k: Float[Tensor, "agent head token dim"],
    v: Float[Tensor, "agent head token dim"],
    scale: float,
    mask: Bool[Tensor, "#agent #one row token"] | None,
) -> tuple[Float[Tensor, "agent head row dim"], Float[Tensor, "agent head row"]]:
    """The equation as it stands, in fp32, on any device: the reference for the fast paths."""
    scores = q.float() @ k.float().mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return weights @ v.float(), lse


def _attend_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: RowMask | None
) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.to(q.dtype), v.to(q.dtype), 0.0, False,
        attn_mask=None if mask is None else mask.bias, scale=scale,
    )  # fmt: skip
    out, lse = out.float(), lse.float()
    if mask is not None and mask.dead is not None:
        lse = lse.masked_fill(mask.dead, -math.inf)
        out = out.masked_fill(mask.dead[..., None], 0.0)
    return out, lse
