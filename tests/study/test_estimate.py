"""Estimates: weights as published, sums as by hand, times as stored, refusals with arithmetic."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from polykv_lib import hf, presets
from polykv_lib.study import notebook
from polykv_lib.study.estimate import TWO_T4, DoesNotFit, Machine, estimate
from polykv_lib.study.estimate.expected import CPU, CPU_AVX2
from polykv_lib.study.grid import Entry, Grid, expand, load_grid
from polykv_lib.study.params import ExperimentParameters
from polykv_lib.study.params.schemas import Throughput
from polykv_lib.study.store import collect, load

ROOT = Path(__file__).parents[2]
ONE_T4 = dataclasses.replace(TWO_T4, n_devices=1)
ONE_CORE = Machine(name="CPU", n_devices=1, memory=10**10, element_bytes=4, rates=CPU, is_gpu=False)


def point(notebook: str, **params: Any) -> ExperimentParameters:
    grid = Grid(points=[Entry(notebook=notebook, params=params)])
    [found] = expand(grid, ROOT / "notebooks", "test")
    assert isinstance(found.chosen, ExperimentParameters)
    return found.chosen


@pytest.mark.parametrize(
    ("name", "n_weights"),  # as the model cards' safetensors headers count them
    [
        ("smollm2-135m", 134_515_008),
        ("smollm2-1.7b", 1_711_376_384),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("llama-3.1-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_weights_are_counted_without_loading_them(name: str, n_weights: int) -> None:
    found = hf.footprint(name)
    assert found.n_weights == n_weights
    assert found.weight_bytes(2) == 2 * n_weights
    if name in presets.GEOMETRIES:
        assert found.geometry == presets.geometry(name)


def test_a_local_folder_is_counted_from_its_config(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = LlamaForCausalLM(config)
    found = hf.footprint(str(tmp_path))
    assert found.n_weights == model.num_parameters()
    assert found.n_linear == model.num_parameters() - 2 * 100 * 32 - 5 * 32  # embeddings, norms
    assert (found.geometry.n_kv_heads, found.geometry.head_dim) == (2, 8)


def test_four_bits_shrink_the_linear_layers_alone() -> None:
    found = hf.footprint("llama-3-8b@4bit")
    embeddings = 2 * 128_256 * 4096
    assert found.weight_bytes(2) == pytest.approx(2 * embeddings + 0.516 * 6.98e9, rel=1e-3)


def test_an_8b_model_needs_two_t4s_or_four_bits() -> None:
    small: dict[str, Any] = {"CONTEXT_TOKENS": [1285], "N_AGENTS": [3]}
    llama = point("03_agent_fidelity", MODEL="llama-3-8b", **small)
    two = estimate(llama, TWO_T4)
    assert two is not None
    assert two.fits
    assert two.cache == 131_072 * (2 * 1285 + 3 * (60 + 48))  # bytes a token, by hand
    one = estimate(llama, ONE_T4)
    assert one is not None
    with pytest.raises(
        DoesNotFit,
        match=r"llama-3-8b does not fit: weights 16\.06 \+ keys and values 0\.38 \+ activations 0\.\d\d"
        r" = 16\.\d\d GB, of 15\.21 GB usable on 1 x T4; try MODEL=llama-3-8b@4bit",
    ):
        one.checked()
    quantised = estimate(point("03_agent_fidelity", MODEL="llama-3-8b@4bit", **small), ONE_T4)
    assert quantised is not None
    assert quantised.checked().startswith("estimate for llama-3-8b@4bit: about ")


def test_more_tokens_never_fit_better() -> None:
    sizes = [1_000, 10_000, 100_000]
    fits = []
    for n in sizes:
        found = estimate(point("03_agent_fidelity", MODEL="qwen3-8b", CONTEXT_TOKENS=[n]), TWO_T4)
        assert found is not None
        fits.append(found.fits)
    assert fits == [True, True, False]


@pytest.mark.parametrize("profile", ["t4", "t4-8b"])
def test_every_point_of_the_t4_grids_fits_two_t4s_and_a_session_of_nine_hours(profile: str) -> None:
    points = expand(load_grid(ROOT / f"env/grids/{profile}.yaml"), ROOT / "notebooks", profile)
    for each in points:
        if isinstance(each.chosen, ExperimentParameters):
            found = estimate(each.chosen, TWO_T4)
            assert found is None or found.fits, f"{each.label}: {found.arithmetic}"
            assert found is None or (found.seconds or 0) < 9 * 3600, each.label


def test_times_agree_with_the_stored_points_of_the_cpu() -> None:
    grids = [(p, load_grid(ROOT / f"env/grids/{p}.yaml")) for p in ("offline", "offline-full")]
    points = {x.key: x for p, grid in grids for x in expand(grid, ROOT / "notebooks", p) if x.key}
    ratios = {}
    for record in collect(ROOT / "data" / "results"):
        found = points.get(record.key)
        if found is None or not isinstance(found.chosen, ExperimentParameters):
            continue
        slow = record.provenance.get("native_attention", "").startswith(
            "off: CPU or compiler lacks"
        )
        rates = CPU_AVX2 if slow else CPU
        expected = estimate(found.chosen, dataclasses.replace(ONE_CORE, rates=rates))
        own_threads = isinstance(found.chosen, Throughput)  # one or two, and counted
        on_one = record.provenance["torch_threads"] == 1
        if expected and expected.seconds and (on_one or own_threads):
            ratios[f"{found.label} {record.key}"] = expected.seconds / record.provenance["wall_s"]
    assert len(ratios) >= 4
    assert any(name.startswith("09_throughput") for name in ratios)
    assert all(0.4 < ratio < 2.5 for ratio in ratios.values()), json.dumps(ratios, indent=1)


THROUGHPUT: dict[str, Any] = {"CONTEXT_TOKENS": [2048], "N_AGENTS": [1, 15, 64]}


def test_throughput_counts_all_its_copies_on_a_cpu_and_refuses_what_cannot_fit() -> None:
    found = estimate(point("09_throughput", **THROUGHPUT), ONE_CORE)
    assert found is not None
    token = 2 * 30 * 2 * 3 * 64  # bytes of a token's keys and values, in the point's bfloat16
    assert found.weights == 2 * 134_515_008
    assert found.cache > 4 * 64 * 2048 * token  # four methods with a copy an agent
    with pytest.raises(DoesNotFit, match=r"= 1\d\.\d\d GB, of 10\.00 GB usable on CPU"):
        found.checked()
    limited = estimate(point("09_throughput", MAX_CACHE_GB=1.0, **THROUGHPUT), ONE_CORE)
    assert limited is not None
    assert limited.fits  # 64 copies are left out, 15 are 0.7 GB
    assert found.cache - limited.cache == pytest.approx(4 * (64 - 15) * 2048 * token, rel=0.01)


def test_throughput_takes_longer_with_more_of_anything_and_less_with_two_threads() -> None:
    def seconds(**params: Any) -> float:
        found = estimate(point("09_throughput", **{**THROUGHPUT, **params}), ONE_CORE)
        assert found is not None
        assert found.seconds is not None
        return found.seconds

    one = seconds()
    assert seconds(ROUNDS=20) > one
    assert seconds(CODECS=["paper"]) < one
    assert seconds(CONTEXT_TOKENS=[8000]) > one
    assert seconds(THREADS=2) == pytest.approx(one / 2, rel=0.2)
    assert seconds(DTYPE="float32") > one


def test_a_gpu_leaves_out_copies_that_find_no_room() -> None:
    found = estimate(point("09_throughput", MAX_CACHE_GB=100, **THROUGHPUT), ONE_T4)
    assert found is not None
    assert found.fits


def test_a_model_nobody_knows_has_no_estimate() -> None:
    assert estimate(point("02_ppl_inversion", MODEL="no-such-model"), TWO_T4) is None


def test_the_notebook_states_the_estimate_and_refuses_what_cannot_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = point("02_ppl_inversion", OUT_DIR=str(tmp_path), PROFILE="test")
    small = dataclasses.replace(ONE_CORE, memory=10**9)
    monkeypatch.setattr(notebook, "this_machine", lambda: small)
    monkeypatch.setattr(notebook, "compute", lambda *_: pytest.fail("it was computed"))
    with pytest.raises(
        DoesNotFit, match=r"weights 0\.54 .* GB, of 1\.00 GB usable on CPU; try fewer"
    ):
        notebook.run_point("ppl_inversion", chosen)
    [file] = tmp_path.rglob("*.json")
    record = load(file)
    assert record is not None
    assert record.error is not None
    assert record.error.type == "DoesNotFit"

    def compute(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(notebook, "this_machine", lambda: ONE_CORE)
    monkeypatch.setattr(notebook, "compute", compute)
    with pytest.raises(KeyboardInterrupt):
        notebook.run_point("ppl_inversion", chosen)
    assert capsys.readouterr().out.startswith("estimate for smollm2-135m: about ")
