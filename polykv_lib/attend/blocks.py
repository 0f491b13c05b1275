"""Attention over a layer's pieces by torch, which decodes them a block at a time."""

import math
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.attend import chunked
from polykv_lib.attend.dense import LN2
from polykv_lib.attend.stored import Piece
from polykv_lib.kv import Rows

BLOCK = 2048  # tokens decoded at a time: bounds the scratch whatever the document's length
FEW = 64  # tokens by which a block may be longer, so that none is opened for them
ALIGNED = 16  # numbers: rows of scores start at multiples of a cache line
MAX_SCORES = 1 << 21  # scores held at a time: with many rows, blocks get shorter

Lse = Float[Tensor, "head row"]
Span = tuple[Piece, int, int]  # tokens start..stop of a piece
Partial = tuple[Tensor, Tensor]  # attention over some tokens: its output and lse, here in base 2


def attend_blocks(
    q: Float[Tensor, "agent q_head query dim"],
    pieces: Sequence[Piece],
    n_heads: int,
    scale: float,
    own: tuple[Tensor, Tensor] | None,
) -> tuple[Float[Tensor, "agent q_head query dim"], Float[Tensor, "agent q_head query"]]:
    """`SharedLayer.attend` by torch's operations alone: pieces are decoded a block at a time."""
    agents, _, queries, _ = q.shape
    rows = fold(q, n_heads) * (scale / LN2)  # scores in base 2: torch's exp2 is 3x faster than exp
    whole = [piece for piece in pieces if piece.heads is None]
    groups: dict[tuple[int, ...], list[Piece]] = {}
    for piece in pieces:
        if piece.heads is not None:
            groups.setdefault(piece.heads, []).append(piece)
    if own is None:
        before = None
    else:
        before = fold(own[0], n_heads), fold(own[1][..., None], n_heads)[..., 0] / LN2
    out, lse = _attend_together(rows, whole, q.dtype, before)
    if groups:
        out, lse = out.clone(), lse.clone()  # what came in stays as it was
    for heads, of_heads in groups.items():
        at = _index(heads)
        out[at], lse[at] = _attend_together(rows[at], of_heads, q.dtype, (out[at], lse[at]))
    return unfold(out, agents, queries), unfold(lse[..., None], agents, queries)[..., 0] * LN2


def _attend_together(
    rows: Rows, pieces: Sequence[Piece], dtype: torch.dtype, partial: Partial | None
) -> Partial:
    """Attention over pieces that the same heads hold, added to a partial result."""
    n_heads, n_rows, _ = rows.shape
    step = min(BLOCK, max(256, MAX_SCORES // (n_heads * max(n_rows, 1)) // 256 * 256))
    rest = list[Piece]()
    for piece in pieces:
        found = chunked.attend(rows, piece, dtype)
        if found is None:
            rest.append(piece)
        else:
            partial = found if partial is None else merge_two(partial, found)
    for block in _blocks(rest, step):
        partial = _attend_block(rows, block, dtype, partial)
    if partial is None:
        return torch.zeros_like(rows), rows.new_full(rows.shape[:2], -math.inf)
    return partial


def merge_two(one: Partial, other: Partial) -> Partial:
    """Attention over the tokens of both; only `one` may be over none."""
    lse = torch.logaddexp2(one[1], other[1])
    return torch.lerp(one[0], other[0], (other[1] - lse).exp2_()[..., None]), lse


def _blocks(pieces: Sequence[Piece], step: int) -> Iterator[list[Span]]:
    """Spans of at most `step` tokens; one of few tokens, such as sinks, shares the next's block."""
    block: list[Span] = []
    n_tokens = 0
    for piece in pieces:
        for start in range(0, piece.n_tokens, step):
            stop = min(start + step, piece.n_tokens)
            if block and n_tokens + stop - start > step + FEW:
                yield block
                block, n_tokens = [], 0
            block.append((piece, start, stop))
            n_tokens += stop - start
    if block:
        yield block


def _attend_block(
    rows: Rows, block: Sequence[Span], dtype: torch.dtype, before: Partial | None
) -> Partial:
    """One softmax over the spans of a block, each in its own codec's basis.

    What was attended to before is one more token: its lse is the score, its output the value.
    """
    block = sorted(block, key=lambda span: span[1] - span[2])  # the longest at an aligned column
    sizes = [stop - start for _, start, stop in block] + [0 if before is None else 1]
    width = sum(sizes)
    scores = rows.new_empty(*rows.shape[:2], -(-width // ALIGNED) * ALIGNED)[..., :width]
    *columns, earlier = scores.split(sizes, dim=-1)
    for (piece, start, stop), part in zip(block, columns, strict=True):
        keys = piece.keys.levels(start, stop, torch.float32)
        torch.bmm(piece.keys.to_levels(rows), keys.mT, out=part)
        _scale(part, piece.keys.gains(start, stop))
    if before is not None:
        earlier.copy_(before[1][..., None])
    largest = scores.amax(-1, keepdim=True)
    total = scores.sub_(largest).exp2_().sum(-1, keepdim=True)
    out: Rows | None = None if before is None else before[0] * earlier
    for (piece, start, stop), part in zip(block, columns, strict=True):
        _scale(part, piece.values.gains(start, stop))
        # For few tokens the set-up of a half-precision product costs more than the product.
        exact = dtype if stop - start > FEW else torch.float32
        weighted = torch.bmm(part.to(exact), piece.values.levels(start, stop, exact)).float()
        weighted = piece.values.from_levels(weighted)
        out = weighted if out is None else out.add_(weighted)
    assert out is not None
    return out / total, (largest + total.log2())[..., 0]


def _scale(columns: Float[Tensor, "head row token"], gains: Tensor | None) -> None:
    if gains is not None:
        columns.mul_(gains[:, None])


def _index(heads: tuple[int, ...]) -> slice | list[int]:
    """The heads as a slice where they are neighbours: a view instead of a copy."""
    first, end = heads[0], heads[-1] + 1
    return slice(first, end) if heads == tuple(range(first, end)) else list(heads)


def fold(q: Float[Tensor, "agent q_head query dim"], n_heads: int) -> Rows:
    """The queries of a KV head as fp32 rows of one matrix: [head, agent * group * query, dim]."""
    by_head = q.reshape(q.shape[0], n_heads, -1, q.shape[-1]).transpose(0, 1)
    return by_head.to(torch.float32, memory_format=torch.contiguous_format).flatten(1, 2)


def unfold(rows: Rows, agents: int, queries: int) -> Float[Tensor, "agent q_head query dim"]:
    """The inverse of `fold`."""
    by_agent = rows.unflatten(1, (agents, -1)).transpose(0, 1)
    return by_agent.reshape(agents, -1, queries, rows.shape[-1])
