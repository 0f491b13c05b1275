"""Exact attention over a cache held in pieces: a shared document and each agent's own tokens.

Every function returns the output and the log-sum-exp (lse, natural log) of the scores, so that
results over disjoint sets of tokens add up to the result over their union (Hydragen,
arXiv:2402.05099).
"""

from polykv_lib.attend.dense import RowMask, attend, attend_plain, row_mask
from polykv_lib.attend.layer import SharedLayer, attend_pieces
from polykv_lib.attend.stored import Piece, Stored

__all__ = [
    "Piece",
    "RowMask",
    "SharedLayer",
    "Stored",
    "attend",
    "attend_pieces",
    "attend_plain",
    "row_mask",
]
