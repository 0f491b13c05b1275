"""Attention of all agents at once over one layer of a pool, by the fastest way that there is."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from polykv_lib.attend import native
from polykv_lib.attend.blocks import attend_blocks, merge_two
from polykv_lib.attend.dense import LN2, RowMask
from polykv_lib.attend.prepared import Prepared
from polykv_lib.attend.stored import Piece


class SharedLayer:
    """One layer of a pool, as queries attend to it step by step."""

    def __init__(self, pieces: Sequence[Piece], n_heads: int, by_torch: bool = False) -> None:
        """Disjoint sets of tokens, of which heads may hold different numbers; KV heads.

        `by_torch` leaves the native kernel out.
        """
        self.pieces, self.n_heads, self.by_torch = tuple(pieces), n_heads, by_torch
        self._prepared: dict[tuple[int, torch.dtype], Prepared | None] = {}

    def attend(
        self,
        q: Float[Tensor, "agent q_head query dim"],
        scale: float,
        own: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Float[Tensor, "agent q_head query dim"], Float[Tensor, "agent q_head query"]]:
        """Softmax(q k^T scale) v for the queries of all agents at once.

        Args:
            q: queries; every one sees every token of the pieces.
            scale: of the scores, usually head_dim ** -0.5.
            own: out and lse of the queries over other tokens, such as each agent's own (`attend`);
                the result is then attention over both.

        Returns:
            out and lse in fp32. Scores are fp32; weights meet values in q's dtype. On a GPU keys
            and values are fp16 (`chunked.attend`), or fp32 for queries of fp32; `native.attend`
            says how exact it is, where it is used.
        """
        layer = self._native(q)
        found = native.attend(layer, q, scale) if layer is not None and self.pieces else None
        if found is None:
            return attend_blocks(q, self.pieces, self.n_heads, scale, own)
        if own is None:
            return found
        out, lse = merge_two(*((out, lse / LN2) for out, lse in (own, found)))
        return out, lse * LN2

    def step(
        self,
        q: Float[Tensor, "agent q_head query dim"],
        keys: Float[Tensor, "agent head own dim"],
        values: Float[Tensor, "agent head own dim"],
        scale: float,
        mask: RowMask | None,
    ) -> Float[Tensor, "agent query q_head dim"] | None:
        """Attention of a decode step over the agents' own tokens and the pieces, in q's dtype.

        None where it is not one query an agent, or not the native kernel's to compute.
        """
        layer = self._native(q) if q.shape[2] == 1 else None
        if layer is None:
            return None
        visible = None if mask is None else mask.visible
        return native.step(layer, q, keys, values, scale, visible)

    def _native(self, q: Tensor) -> Prepared | None:
        """What the kernel is told of the pieces; None where torch reads them."""
        if self.by_torch or q.device.type != "cpu" or not native.is_on():
            return None
        kind = q.shape[-1], q.dtype
        if kind not in self._prepared:
            self._prepared[kind] = Prepared.of(self.pieces, self.n_heads, *kind)
        return self._prepared[kind]


def attend_pieces(
    q: Float[Tensor, "agent q_head query dim"],
    pieces: Sequence[Piece],
    n_heads: int,
    scale: float,
    own: tuple[Tensor, Tensor] | None = None,
) -> tuple[Float[Tensor, "agent q_head query dim"], Float[Tensor, "agent q_head query"]]:
    """`SharedLayer.attend`, once."""
    return SharedLayer(pieces, n_heads).attend(q, scale, own)
