"""Exact attention over a cache held in pieces: a shared document and each agent's own tokens.

Every function returns the output and the log-sum-exp (lse, natural log) of the scores, so that
results over disjoint sets of tokens merge into the result over their union (Hydragen,
arXiv:2402.05099).
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from polykv_lib.kv import Rows

BLOCK = 2048  # tokens decoded at a time: bounds the scratch whatever the document's length
MAX_SCORES = 1 << 21  # scores held at a time: with many rows, blocks get shorter

Lse = Float[Tensor, "head row"]


@runtime_checkable
class Stored(Protocol):
    """Keys or values at rest: x_hat[t] = gain[t] * levels[t] @ B (see quantize/base.py)."""

    def levels(self, start: int, stop: int, dtype: torch.dtype) -> Float[Tensor, "head token dim"]:
        """Decoded levels of tokens start..stop."""
        ...

    def gains(self, start: int, stop: int) -> Float[Tensor, "head token"] | None:
        """The fp32 factor of each token."""
        ...

    def to_levels(self, rows: Rows) -> Rows:
        """The rows times B^T."""
        ...

    def from_levels(self, rows: Rows) -> Rows:
        """The rows times B."""
        ...


@runtime_checkable
class Piece(Protocol):
    """Tokens that some KV heads hold, the same number for each."""

    @property
    def heads(self) -> tuple[int, ...] | None:
        """The heads; None for all of the layer."""
        ...

    @property
    def n_tokens(self) -> int:
        """Tokens held by each head."""
        ...

    @property
    def keys(self) -> Stored:
        """The keys, after RoPE."""
        ...

    @property
    def values(self) -> Stored:
        """The values."""
        ...


def attend_pieces(
    q: Float[Tensor, "agent q_head query dim"],
    pieces: Sequence[Piece],
    n_heads: int,
    scale: float,
) -> tuple[Float[Tensor, "agent q_head query dim"], Float[Tensor, "agent q_head query"]]:
    """Softmax(q k^T scale) v over one layer of a pool, for the queries of all agents at once.

    Args:
        q: queries; every one sees every token of the pieces.
        pieces: disjoint sets of tokens; heads may hold different numbers of them.
        n_heads: KV heads of the layer.
        scale: of the scores, usually head_dim ** -0.5.

    Returns:
        out and lse in fp32. Scores are fp32; weights meet values in q's dtype.
    """
    agents, _, queries, _ = q.shape
    rows = fold(q, n_heads).float()
    of_all_heads = [p for p in pieces if p.heads is None]
    parts = [_attend_piece(rows, piece, scale, q.dtype) for piece in of_all_heads]
    out, lse = reduce(lambda a, b: merge(*a, *b), parts) if parts else _nothing(rows)
    for piece in pieces:
        if piece.heads is not None:
            heads = list(piece.heads)
            part = _attend_piece(rows[heads], piece, scale, q.dtype)
            out[heads], lse[heads] = merge(out[heads], lse[heads], *part)
    return unfold(out, agents, queries), unfold(lse[..., None], agents, queries)[..., 0]


def _attend_piece(rows: Rows, piece: Piece, scale: float, dtype: torch.dtype) -> tuple[Rows, Lse]:
    queries = piece.keys.to_levels(rows) * scale
    n_heads, n_rows, _ = rows.shape
    step = min(BLOCK, max(256, MAX_SCORES // (n_heads * max(n_rows, 1))))
    out, lse = _nothing(rows)
    for start in range(0, piece.n_tokens, step):
        stop = min(start + step, piece.n_tokens)
        scores = queries @ piece.keys.levels(start, stop, torch.float32).mT
        gains = piece.keys.gains(start, stop)
        if gains is not None:
            scores *= gains[:, None]
        weights = scores.softmax(-1)
        # The largest probability is exp(max - lse): no second pass of exponentials.
        part_lse = scores.amax(-1) - weights.amax(-1).log()
        gains = piece.values.gains(start, stop)
        if gains is not None:
            weights *= gains[:, None]
        part = (weights.to(dtype) @ piece.values.levels(start, stop, dtype)).float()
        out, lse = (part, part_lse) if start == 0 else merge(out, lse, part, part_lse)
    return piece.values.from_levels(out), lse


def _nothing(rows: Rows) -> tuple[Rows, Lse]:
    """Attention over no token at all."""
    return torch.zeros_like(rows), rows.new_full(rows.shape[:2], -math.inf)


def attend(
    q: Float[Tensor, "agent q_head query dim"],
    k: Float[Tensor, "agent head token dim"],
    v: Float[Tensor, "agent head token dim"],
    scale: float,
    mask: Bool[Tensor, "#agent #one query token"] | None = None,
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
        mask = torch.ones(queries, n_tokens, dtype=torch.bool, device=q.device)
        mask = mask.tril(n_tokens - queries)[None, None]
    folded = q.reshape(agents, n_heads, -1, dim)
    if mask is not None:
        groups = q_heads // n_heads
        mask = mask[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
    kernel = _attend_cpu if q.device.type == "cpu" else attend_plain
    out, lse = kernel(folded, k, v, scale, mask)
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
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    bias, dead = None, None
    if mask is not None:
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf)
        dead = ~mask.any(-1)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k.to(q.dtype), v.to(q.dtype), 0.0, False, attn_mask=bias, scale=scale
    )
    out, lse = out.float(), lse.float()
    if dead is not None and dead.any():
        lse = lse.masked_fill(dead, -math.inf)
        out = out.masked_fill(dead[..., None], 0.0)
    return out, lse


def merge(
    out_a: Float[Tensor, "*batch dim"],
    lse_a: Float[Tensor, "*batch"],
    out_b: Float[Tensor, "*batch dim"],
    lse_b: Float[Tensor, "*batch"],
) -> tuple[Float[Tensor, "*batch dim"], Float[Tensor, "*batch"]]:
    """Attention over two disjoint sets of tokens, from each alone (lse = -inf: an empty set)."""
    lse = torch.logaddexp(lse_a, lse_b)
    reference = lse.masked_fill(lse == -math.inf, 0.0)
    weight_a, weight_b = (lse_a - reference).exp(), (lse_b - reference).exp()
    return out_a * weight_a[..., None] + out_b * weight_b[..., None], lse


def fold(q: Float[Tensor, "agent q_head query dim"], n_heads: int) -> Rows:
    """The queries of a KV head as rows of one matrix: [head, group * agent * query, dim]."""
    grouped = q.unflatten(1, (n_heads, -1))
    return grouped.permute(1, 2, 0, 3, 4).flatten(1, 3)


def unfold(rows: Rows, agents: int, queries: int) -> Float[Tensor, "agent q_head query dim"]:
    """The inverse of `fold`."""
    grouped = rows.unflatten(1, (-1, agents, queries))
    return grouped.permute(2, 0, 1, 3, 4).flatten(1, 2)
