"""A saved pool opens as it was, for its own model, or not at all."""

import json
import struct

import pytest
import torch

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.pool import PoolError, file, freeze

CODECS = [
    {"keys": pk.Int8("tensor"), "values": pk.TurboQuant(3, "plain"), "n_sink": 0},
    {"keys": pk.Int8("block"), "values": pk.Affine(5, 8, "channel")},
    {"keys": [pk.HarmonicTurboQuant(b) for b in (2, 4)], "values": [pk.TurboQuant(), pk.Int8()]},
    {"keys": pk.TurboQuant(4, norms="byte", shaped=True), "values": pk.FullPrecision()},
    {"keys": pk.Tiered((pk.Int8(), pk.TurboQuant(2)), (0.3,)), "values": pk.TurboQuant(3)},
    {"keys": pk.FullPrecision(), "values": pk.TurboQuant(2, "double", seed=7, match_norm=True)},
]


@pytest.fixture
def saved(llama, tokens, tmp_path):
    pool = pk.build_pool(llama, tokens(1, 37), **CODECS[0])
    return pool.save(tmp_path / "pool.safetensors")


@pytest.mark.parametrize("codec", CODECS)
def test_a_pool_opens_as_it_was_saved(tiny_model, tokens, tmp_path, codec):
    model = tiny_model("Llama", hidden_size=128)  # head_dim 32, which q8_0 blocks need
    pool = pk.build_pool(model, tokens(1, 37), **codec)
    opened = pk.load_pool(pool.save(tmp_path / "p"), model)
    assert opened.tensors.keys() == pool.tensors.keys()
    assert all(torch.equal(opened.tensors[k], t) for k, t in pool.tensors.items())
    own = tokens(2, 5, seed=1)
    a, b = (hf.logits(model, p.agent_cache(2), own, 37) for p in (pool, opened))
    assert torch.equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]  # no partial file left behind


def test_a_ragged_pool_opens_as_it_was_saved(llama, tokens, tmp_path):
    kept = [[torch.arange(5), torch.arange(3, 20)], [torch.arange(9)] * 2]
    pool = freeze(hf.read_document(llama, tokens(1, 37)), **CODECS[0], kept=kept)
    opened = pk.load_pool(pool.save(tmp_path / "p"), llama)
    assert opened.kept_per_head == ((5, 17), (9, 9))
    assert opened.n_tokens == 37
    assert opened.nbytes == pool.nbytes


def test_another_models_pool(tiny_model, saved):
    with pytest.raises(
        PoolError,
        match=r"\(layers, KV heads, head_dim\) = \(2, 2, 16\), but the model has \(1, 2, 16\)",
    ):
        pk.load_pool(saved, tiny_model("Llama", num_hidden_layers=1))
    other = tiny_model("Llama")
    with torch.no_grad():
        other.lm_head.weight += 1
        for parameter in other.parameters():
            parameter.mul_(1.5)
    with pytest.raises(
        PoolError, match=r"belongs to .* with model_fingerprint .* Build the pool again"
    ):
        pk.load_pool(saved, other)


def test_damaged_files(saved, llama, tmp_path):
    whole = saved.read_bytes()
    saved.write_bytes(whole[:-10])
    with pytest.raises(PoolError, match="is truncated or no safetensors file"):
        pk.load_pool(saved, llama)
    altered = bytearray(whole)
    altered[-100] ^= 1
    saved.write_bytes(altered)
    with pytest.raises(PoolError, match="was altered: its checksum does not match"):
        pk.load_pool(saved, llama)
    for old, new in (
        (b'\\"n_tokens\\": 37', b'\\"n_tokens\\": 39'),
        (b'\\"seed\\": 0', b'\\"seed\\": 1'),
    ):
        assert old in whole
        saved.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(PoolError, match="was altered"):
            pk.load_pool(saved, llama)
    saved.write_bytes(whole.replace(b"checksum", b"chocksum", 1))
    with pytest.raises(PoolError, match=r"the header of .* is damaged"):
        pk.load_pool(saved, llama)
    with pytest.raises(PoolError, match="there is no pool at"):
        pk.load_pool(tmp_path / "absent", llama)


def test_a_newer_schema_and_a_foreign_file(saved, llama, monkeypatch, tokens):
    monkeypatch.setattr(file, "SCHEMA", 2)
    newer = pk.build_pool(llama, tokens(1, 9), **CODECS[0]).save(saved)
    monkeypatch.undo()
    with pytest.raises(PoolError, match="has schema 2, this version reads up to 1"):
        pk.load_pool(newer, llama)
    header = json.dumps({"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    saved.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")
    with pytest.raises(PoolError, match="holds no PolyKV pool"):
        pk.load_pool(saved, llama)


def test_a_folder_that_can_not_be_written(llama, tokens, tmp_path):
    pool = pk.build_pool(llama, tokens(1, 9), **CODECS[0])
    with pytest.raises(PoolError, match="Choose a file name in a writable folder"):
        pool.save(tmp_path / "absent" / "pool")
