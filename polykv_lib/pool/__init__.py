"""Codes -> one pool: build it, count it, save it, open it."""

from polykv_lib.pool.freeze import Codecs, check_codecs, freeze
from polykv_lib.pool.pieces import Piece, PoolError, Stored
from polykv_lib.pool.shared import SharedKVPool, load
from polykv_lib.pool.sizes import SIZE_OF_ID, layer_nbytes, layers_nbytes, sizes_of
from polykv_lib.pool.tiered import Side, Tiered, is_lossless, shared_sinks

__all__ = [
    "SIZE_OF_ID",
    "Codecs",
    "Piece",
    "PoolError",
    "SharedKVPool",
    "Side",
    "Stored",
    "Tiered",
    "check_codecs",
    "freeze",
    "is_lossless",
    "layer_nbytes",
    "layers_nbytes",
    "load",
    "shared_sinks",
    "sizes_of",
]
