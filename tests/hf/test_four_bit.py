"""Weights in 4 bits, loaded by bitsandbytes for real: on a CPU here, on a GPU with other kernels."""

import pytest
import torch
from torch.testing import assert_close
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

import polykv_lib as pk
from polykv_lib import hf, presets
from polykv_lib.hf.compat import forward
from polykv_lib.hf.models import load_model, loading, model_fingerprint, placement
from polykv_lib.pool import PoolError

bitsandbytes = pytest.importorskip("bitsandbytes")

NAME = "smollm2-135m@4bit"
LOSSLESS = {"keys": pk.FullPrecision(), "values": pk.FullPrecision()}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog dreams of a quicker fox. " * 6


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(NAME, device="cpu")


@torch.no_grad()
def test_a_lossless_pool_is_a_plain_forward_of_the_quantised_weights(loaded) -> None:
    model, tokenizer = loaded
    document, own = pk.document_ids(tokenizer, TEXT), torch.tensor([[19556, 905, 1330, 288, 2013]])
    plain = model(torch.cat([document, own], dim=1)).logits[:, document.shape[1] :]
    pool = pk.build_pool(model, document, **LOSSLESS)
    pooled = forward(model, own, cache=pool.agent_cache(1)).logits
    assert_close(pooled, plain, atol=1e-5 * plain.abs().max().item(), rtol=0)
    compressed = pk.build_pool(model, document, keys=pk.Int8(), values=pk.TurboQuant(3))
    lossy = forward(model, own, cache=compressed.agent_cache(1)).logits
    assert (lossy - plain).abs().max() > 1e-2, "the comparison sees a codec"


def test_the_weights_are_in_four_bits_and_are_estimated_to_one_percent(loaded) -> None:
    model, _ = loaded
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert {layer.weight.quant_state.quant_type for layer in layers} == {"nf4"}
    states = [layer.weight.quant_state for layer in layers]
    scales = sum(s.absmax.nbytes + s.state2.absmax.nbytes for s in states)  # quantised themselves
    held = sum(weight.nbytes for weight in model.parameters()) + scales
    assert hf.footprint(NAME).weight_bytes(4) == pytest.approx(held, rel=0.01)


def test_a_saved_pool_knows_the_quantised_model_from_the_other(loaded, tmp_path) -> None:
    model, tokenizer = loaded
    before = model_fingerprint(model)
    codec = presets.codec("polykv")
    kinds = {"keys": codec.keys, "values": codec.values, "n_sink": codec.n_sink}
    pool = pk.build_pool(model, pk.document_ids(tokenizer, TEXT), **kinds)
    pool.save(tmp_path / "fox.pool")
    answers = [
        pk.ask(model, tokenizer, either, ["Who jumps?"], max_new_tokens=8)
        for either in (pool, pk.load_pool(tmp_path / "fox.pool", model))
    ]
    assert answers[0] == answers[1]
    assert model_fingerprint(model) == before, "using a model does not change it"
    with pytest.raises(PoolError, match="model_fingerprint"):
        pk.load_pool(tmp_path / "fox.pool", load_model("smollm2-135m", device="cpu")[0])


def test_on_a_t4_they_compute_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def from_pretrained(source: str, **options: object) -> PreTrainedModel:
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(InterruptedError):
        load_model(NAME)
    quantised = asked["quantization_config"]
    assert isinstance(quantised, BitsAndBytesConfig)
    assert quantised.bnb_4bit_compute_dtype is asked["dtype"] is torch.float16
    assert asked["device_map"] == {"": torch.device("cuda")}


def test_without_bitsandbytes_the_install_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps bitsandbytes"):
        load_model(NAME, device="cpu")
