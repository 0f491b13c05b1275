"""Figures show the numbers they are given, in fixed looks and the same bytes each time."""

import json
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from polykv_lib import presets
from polykv_lib.study import figures
from polykv_lib.study.figures import ablations, dataflow, eviction, memory, quality, throughput
from polykv_lib.study.figures.drawing import LOOKS, counted, house_style, look
from polykv_lib.study.published.points import published_memory
from polykv_lib.study.record import Record
from polykv_lib.study.rows import tidy

Draw = Callable[[pd.DataFrame, Axes], None]


def drawn(draw: Draw, records: list[Record]) -> Axes:
    with house_style():
        ax = Figure(layout="constrained").subplots()
        draw(tidy(records), ax)
    return ax


def bars(ax: Axes) -> dict[str, np.ndarray]:
    """The vertical interval of every point, by series label."""
    containers = [c for c in ax.containers if c.lines[2]]  # type: ignore[attr-defined]
    return {c.get_label(): np.array(c.lines[2][0].get_segments())[:, :, 1] for c in containers}  # type: ignore[attr-defined]


def test_perplexity_is_drawn_with_its_interval_and_n(synthetic: list[Record]) -> None:
    ax = drawn(quality.ppl_vs_context, synthetic)
    numbers = tidy(synthetic).query(
        "table == 'ppl' and metric == 'ppl_delta_pct' and protocol == 'fixed-window' and codec == 'paper'"
    )
    interval = bars(ax)["paper's codec"]
    assert interval == pytest.approx(numbers[["lo", "hi"]].to_numpy())
    assert "full precision" not in bars(ax), "a codec that changes nothing has no curve"
    assert ax.get_title(loc="left") == "smollm2-135m, n = 12 articles, fixed-window"
    assert ax.get_ylabel().endswith("[%]")


def test_kl_has_one_point_a_codec_at_its_bits(synthetic: list[Record]) -> None:
    ax = drawn(quality.kl_vs_bits, synthetic)
    points = {c.get_label(): c.lines[0].get_xdata().item() for c in ax.containers}  # type: ignore[attr-defined]
    assert points["polykv"] == 5.7
    assert points["keys only"] == 12.0
    assert len(points) == 6


def test_the_joint_plan_is_drawn_over_bytes_and_ends_where_nothing_fits(
    synthetic: list[Record],
) -> None:
    ax = drawn(figures.FIGURES["joint_plan"].draw, synthetic)
    lines = {c.get_label(): c.lines[0] for c in ax.containers}  # type: ignore[attr-defined]
    assert list(lines["joint plan"].get_ydata()) == pytest.approx([0.32, 0.08])
    assert len(lines["codecs alone"].get_xdata()) == 1
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert bars(ax)["joint plan"] == pytest.approx(np.array([[0.256, 0.416], [0.064, 0.104]]))


def test_fidelity_shows_its_controls_and_encoder(synthetic: list[Record]) -> None:
    ax = drawn(quality.fidelity_vs_agents, synthetic)
    assert set(bars(ax)) == {"pool: polykv", "unrelated document", "no document"}
    assert "all-MiniLM-L6-v2" in ax.get_ylabel()
    assert ax.get_title(loc="left").endswith("n = 1 to 15 articles")


def test_decode_step_starts_at_zero_and_has_every_method(synthetic: list[Record]) -> None:
    ax = drawn(memory.decode_step, synthetic)
    assert ax.get_ylim()[0] == 0
    assert len(bars(ax)) == 4
    assert "2,048 tokens" in ax.get_title(loc="left")


@pytest.mark.parametrize(
    "draw",
    [
        throughput.throughput_vs_agents,
        throughput.step_vs_context,
        throughput.held_vs_agents,
        throughput.first_token_vs_context,
    ],
    ids=lambda d: d.__name__,
)
def test_throughput_has_a_line_a_method_and_names_its_setting(
    draw: Draw, synthetic: list[Record]
) -> None:
    ax = drawn(draw, synthetic)
    labels = {c.get_label() for c in ax.containers}
    assert {"one shared bf16 copy", "pool, paper's codec", "pool, polykv"} < labels
    assert {"a full copy each", "a copy each, heads folded"} < labels
    assert ("no document" in labels) == (draw is not throughput.first_token_vs_context)
    assert ax.get_title(loc="left").startswith("smollm2-135m, bfloat16, Some CPU, 1 thread")


def test_a_step_is_drawn_at_fifteen_agents_with_its_interval(synthetic: list[Record]) -> None:
    ax = drawn(throughput.step_vs_context, synthetic)
    ms = [30 + 0.4 * 15 * tokens / 512 for tokens in (512, 2048)]
    assert bars(ax)["pool, paper's codec"] == pytest.approx(
        np.array([[0.9 * t, 1.2 * t] for t in ms])
    )
    assert "15 agents, n = 7 rounds" in ax.get_title(loc="left")


def test_recovery_has_a_bar_a_plan_and_family_with_its_interval(synthetic: list[Record]) -> None:
    ax = drawn(eviction.recovery_by_family, synthetic)
    heights = {c.get_label(): [bar.get_height() for bar in c] for c in ax.containers if len(c) == 3
               and isinstance(c, BarContainer)}  # fmt: skip
    assert heights["ours"] == pytest.approx([100 * (1 - 0.1 / 0.9)] * 3)
    assert len(heights) == 3, "single policies and the parts of ours are in the tables"
    assert heights["routing by cosine"] == pytest.approx([100 / 9 - 90 * i for i in range(3)])
    gap = 100 * (1 - 0.1 / 0.9)
    intervals = [
        c.lines[2][0].get_segments() for c in ax.containers if not isinstance(c, BarContainer)
    ]  # type: ignore[attr-defined]
    assert np.array(intervals[2])[:, :, 1] == pytest.approx(np.array([[gap - 9, gap + 4]] * 3))
    assert ax.get_ylim()[0] == -100
    assert ax.get_title(loc="left").endswith("n = 6 to 12 items, bars cut at -100 %: 1")


@pytest.mark.parametrize(
    ("draw", "best", "ours"),
    [(eviction.budget_sweep, [0.9] * 2, [0.1] * 2),
     (eviction.budget_sweep_gap, [0] * 2, [100 * (1 - 0.1 / 0.9)] * 2)],
)  # fmt: skip
def test_the_sweep_has_each_budget_of_each_plan_and_bands(
    synthetic: list[Record], draw: Draw, best: list[float], ours: list[float]
) -> None:
    ax = drawn(draw, synthetic)
    lines = {line.get_label(): line for line in ax.lines}
    assert set(lines) == {
        "best single policy",
        "routing by cosine",
        "the same, PPL budgets",
        "ours",
    }
    for label, values in (("best single policy", best), ("ours", ours)):
        assert list(lines[label].get_xdata()) == [0.25, 0.4]
        assert list(lines[label].get_ydata()) == pytest.approx(values)
    assert len(ax.collections) == 4
    assert [t.get_text() for t in ax.get_xticklabels()] == ["25%", "40%"]


def test_signals_stand_on_one_line_forward_and_inverse(synthetic: list[Record]) -> None:
    ax = drawn(ablations.signals_by_decision, synthetic)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["policies, cosine"]
    forward, inverse = (container.lines[0] for container in ax.containers)
    assert (forward.get_xdata()[0], inverse.get_xdata()[0]) == (0.8, 1.8)
    assert forward.get_ydata()[0] > 0 > inverse.get_ydata()[0]
    ax = drawn(ablations.signals_by_phase, synthetic)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["decode: policies, cosine"]


def test_plan_map_shows_each_layers_policy_and_share(synthetic: list[Record]) -> None:
    ax = drawn(eviction.plan_map, synthetic)
    rows = [c for c in ax.containers if isinstance(c, BarContainer) and len(c) == 4]
    uniform, routed = ([bar.get_height() for bar in row] for row in rows)
    assert uniform == pytest.approx([0.9 * 0.25] * 4)
    assert routed == pytest.approx([0.9 * b / 560 for b in (40, 440, 40, 40)])
    for row in rows:
        colours = [bar.get_facecolor()[:3] for bar in row]
        assert colours == [to_rgb(look(p).colour) for p in ("H2O", "KeyDiff") * 2]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["paper-b", "gain-curve"]


def test_published_memory_is_hollow_and_ours_filled(
    synthetic_root: Path, papers: Path, synthetic: list[Record]
) -> None:
    numbers = pd.concat([tidy(synthetic), published_memory(papers)])
    with house_style():
        ax = Figure(layout="constrained").subplots()
        memory.memory_vs_agents(numbers, ax)
    marked = [line for line in ax.lines if line.get_marker() not in ("None", "")]
    hollow = [line for line in marked if line.get_markerfacecolor() == "white"]
    assert sorted(y for line in hollow for y in line.get_ydata()) == [0.454, 0.454, 13.199, 19.798]
    assert len(marked) > len(hollow)
    assert ax.get_title(loc="left") == "llama-3-8b, 5,035 tokens in the pool"


def test_every_codec_has_a_look_of_its_own() -> None:
    assert set(presets.CODECS) <= set(LOOKS)
    looks = [(look(name).colour, look(name).marker) for name in presets.CODECS]
    assert len(set(looks)) == len(looks)
    assert len({look(name).marker for name in presets.CODECS}) == len(looks), "readable in grey"
    assert look("unheard-of").label == "unheard-of"
    assert to_rgb(look("unheard-of").colour) == (0, 0, 0)


def test_files_are_the_same_bytes_each_time(
    synthetic_root: Path, papers: Path, tmp_path: Path
) -> None:
    before = dict(mpl.rcParams)
    written = [figures.write_all(synthetic_root, tmp_path / d, papers_root=papers) for d in "ab"]
    names = {file.name for file in written[0]}
    assert names == {
        f"{name}{'-offline-hidden' if drawing.by else ''}-synthetic.{kind}"
        for name, drawing in figures.FIGURES.items()
        for kind in ("pdf", "png")
    }
    for first, second in zip(*written, strict=True):
        assert first.read_bytes() == second.read_bytes(), first.name
    assert dict(mpl.rcParams) == before


def test_manifest_names_the_records_behind_a_figure(
    synthetic_root: Path, papers: Path, tmp_path: Path
) -> None:
    def manifest() -> dict[str, dict[str, str]]:
        figures.write_all(synthetic_root, tmp_path / "figures", ["png"], papers_root=papers)
        return json.loads((tmp_path / "figures" / "manifest.json").read_text())

    before = manifest()
    assert list(before["kl_vs_bits-synthetic"]) == ["ppl_inversion/0000000000000001"]
    changed = next((synthetic_root / "ppl_inversion").glob("*.json"))
    changed.write_text(changed.read_text().replace('"value": 18.0', '"value": 19.0', 1))
    after = manifest()
    assert after["ppl_vs_context-synthetic"] != before["ppl_vs_context-synthetic"]
    assert after["decode_step-synthetic"] == before["decode_step-synthetic"]


def test_without_results_nothing_is_drawn(tmp_path: Path, papers: Path) -> None:
    assert figures.write_all(tmp_path / "none", tmp_path / "figures", papers_root=papers) == []
    assert json.loads((tmp_path / "figures" / "manifest.json").read_text()) == {}


def test_a_study_cut_short_is_drawn_too(synthetic: list[Record], papers: Path) -> None:
    numbers = tidy(synthetic)
    small = numbers[(numbers["geometry"] == "qwen2.5-7b") | (numbers["protocol"] == "paper-70-30")]
    for draw in (memory.memory_vs_agents, memory.memory_vs_context, quality.ppl_vs_context):
        with house_style():
            ax = Figure(layout="constrained").subplots()
            draw(pd.concat([small, published_memory(papers)]), ax)
            ax.get_figure(root=True).savefig("/dev/null", format="png")


def test_intervals_say_what_they_are_over() -> None:
    assert counted(pd.DataFrame({"n": [12, 12]}), "articles") == "n = 12 articles"
    assert counted(pd.DataFrame({"n": [3, None, 15]}), "answers") == "n = 3 to 15 answers"
    assert counted(pd.DataFrame({"n": [None]}), "answers") == ""


def test_data_flow_picture_is_redrawn_the_same(tmp_path: Path) -> None:
    first, second = (dataflow.write(tmp_path / d) for d in "ab")
    assert [file.name for file in first] == ["dataflow.svg", "dataflow.png"]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
