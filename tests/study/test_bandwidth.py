"""Errors of attention over a pool are measured against what its codes stand for."""

from statistics import fmean

import pytest
import torch

from polykv_lib import presets
from polykv_lib.attend import native
from polykv_lib.kv import Geometry
from polykv_lib.pool import SharedKVPool
from polykv_lib.study.experiments.speed import bandwidth
from polykv_lib.study.experiments.speed.bandwidth import Queries, Shape

SMALL = Geometry(n_layers=2, n_q_heads=6, n_kv_heads=2, head_dim=64)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.GEOMETRIES, "small", SMALL)


def made(codec: str, seed: int) -> tuple[SharedKVPool, Queries]:
    shape = Shape(geometry="small", n_tokens=300, n_agents=4, dtype=torch.bfloat16,
                  device=torch.device("cpu"))  # fmt: skip
    return shape.pool(codec, seed), shape.queries(seed)


def over(keys: torch.Tensor, values: torch.Tensor, q: Queries) -> Queries:
    """Attention in fp64, with every KV head repeated for its query heads."""
    heads = (x.double().repeat_interleave(3, dim=1) for x in (keys, values))
    k, v = (x.expand(q.shape[0], -1, -1, -1) for x in heads)
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v)


@pytest.mark.parametrize("codec", ["full", "paper", "polykv", "compact", "tiered"])
def test_a_pool_is_read_no_less_exactly_than_a_dense_copy(codec: str) -> None:
    if codec == "full" and not native.is_on():
        pytest.skip("torch's blocks round more of an uncompressed pool's weights than sdpa does")
    of_pool, of_copy = [], []
    for seed in range(8):
        pool, q = made(codec, seed)
        layers = bandwidth.shared_layers(pool)
        of_pool.append(bandwidth.error(bandwidth.over_pool(layers, q), pool, q))
        of_copy.append(bandwidth.error(bandwidth.over_one_copy([pool.read(1)], q), pool, q))
    assert 1e-4 < fmean(of_pool) <= fmean(of_copy)


@pytest.mark.parametrize("codec", ["paper", "polykv", "tiered"])
def test_rounding_of_what_is_read_back_counts_as_an_error(codec: str) -> None:
    pool, q = made(codec, 0)
    exact = over(*bandwidth.in_fp32(pool).read(-1), q)
    assert bandwidth.error(exact, pool, q) < 1e-6
    rounded = over(*pool.read(1), q)  # in bf16: an exact computation over rounded numbers
    assert bandwidth.error(rounded, pool, q) > 1e-3


def test_a_pool_of_another_document_is_far_off() -> None:
    pool, q = made("paper", 0)
    other, _ = made("paper", 1)
    wrong = bandwidth.over_pool(bandwidth.shared_layers(other), q)
    assert bandwidth.error(wrong, pool, q) > 0.5


def test_the_reference_is_the_last_layer_and_leaves_the_pool_as_it_was() -> None:
    pool, _ = made("full", 0)
    keys, values = bandwidth.in_fp32(pool).read(-1)
    assert (keys.dtype, values.dtype) == (torch.float32, torch.float32)
    assert torch.equal(keys, pool.read(1)[0].float())
    assert pool.read(1)[0].dtype == torch.bfloat16
