"""Bytes of a layer before there is one: those of the tensors that a pool then holds."""

from itertools import zip_longest
from typing import Any

import pytest
import torch

from polykv_lib import presets
from polykv_lib.kv import LayerKV
from polykv_lib.pool import SIZE_OF_ID, Tiered, freeze, layer_nbytes

SIDES = [f"{k}+{v}" for k, v in zip_longest(presets.KEYS, presets.VALUES, fillvalue="tq3")]


@pytest.mark.parametrize("codec", [*SIDES, *presets.CODECS])
@pytest.mark.parametrize("n_kept", [1, 4, 5, 69, 129, 130])
def test_sizes_are_those_of_the_pool(codec: str, n_kept: int) -> None:
    torch.manual_seed(0)
    layer = LayerKV(
        keys=torch.randn(1, 3, 130, 64, dtype=torch.bfloat16),
        values=torch.randn(1, 3, 130, 64, dtype=torch.bfloat16),
        moments=torch.eye(64).expand(1, 3, -1, -1),
        attention=torch.rand(1, 3, 130),
    )
    own: Any = presets.codec(codec)
    pool = freeze(
        [layer],
        keys=own.keys,
        values=own.values,
        n_sink=own.n_sink,
        kept=[[torch.arange(n_kept)] * 3],
        document_ids=torch.zeros(1, 130, dtype=torch.int32),
    )
    assert pool.nbytes - 130 * SIZE_OF_ID == layer_nbytes(
        own.keys, own.values, own.n_sink, n_heads=3, n_kept=n_kept, n_tokens=130, head_dim=64
    )
    holds_positions = any("positions" in name for name in pool.tensors)
    ranked = n_kept > own.n_sink and Tiered in (type(own.keys), type(own.values))
    assert holds_positions == (n_kept < 130 or ranked)
