"""Grids: what each profile's file expands to, and what is refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest

from polykv_lib.study import grid as grids
from polykv_lib.study.grid import Entry, Grid, expand, load_grid
from polykv_lib.study.params import NOTEBOOKS, ParameterError

ROOT = Path(__file__).parents[2]
GRIDS = ROOT / "env" / "grids"


def points(grid: Grid, **kwargs: Any) -> list[grids.Point]:
    return expand(grid, ROOT / "notebooks", "test", **kwargs)


@pytest.mark.parametrize("profile", ["smoke", "offline", "offline-full", "t4", "t4-8b"])
def test_each_profile_expands_and_ends_with_tables_and_figures(profile: str) -> None:
    found = expand(load_grid(GRIDS / f"{profile}.yaml"), ROOT / "notebooks", profile)
    keys = [point.key for point in found if point.key]
    assert len(keys) == len(set(keys))
    assert {p.chosen.PROFILE for p in found if p.key} == {profile}
    assert [p.source.stem for p in found[-2:]] == ["10_paper_vs_ours", "11_figures"]
    computing = {name for name, schema in NOTEBOOKS.items() if schema.experiment}
    if profile == "offline":  # it is meant to stay short
        computing -= {"06_inversion_controls", "07_codec_frontier", "08_joint_plan"}
    if profile == "t4-8b":  # the models of the eviction paper
        computing = {"04_longbench_recovery", "05_ablations"}
    assert computing <= {p.source.stem for p in found}


@pytest.mark.parametrize("profile", ["offline", "offline-full"])
def test_every_stored_record_is_a_point_of_its_grid(profile: str) -> None:
    found = expand(load_grid(GRIDS / f"{profile}.yaml"), ROOT / "notebooks", profile)
    keys = {point.key for point in found}
    stored = (ROOT / "data" / "results" / profile).glob("*/*.json")
    others = {file.parent.name for file in stored if file.stem not in keys}
    assert others <= {"throughput_peers"}, "its environments are no notebook's"


def test_smoke_runs_every_notebook() -> None:
    found = points(load_grid(GRIDS / "smoke.yaml"))
    assert {p.source.stem for p in found} == set(NOTEBOOKS)


def test_a_notebook_run_by_itself_computes_a_point_of_an_offline_grid() -> None:
    keys = {
        point.key
        for profile in ("offline", "offline-full")
        for point in expand(load_grid(GRIDS / f"{profile}.yaml"), ROOT / "notebooks", profile)
    }
    for name, schema in NOTEBOOKS.items():
        if schema.experiment:
            (alone,) = points(Grid(points=[Entry(notebook=name)]))
            assert alone.key in keys, f"the defaults of {name} are no point of the offline grids"


def test_sweeps_multiply_in_order_and_equal_points_appear_once() -> None:
    sweep = {"SEED": [0, 1], "ROUNDS": [2, 3]}
    entry = Entry(notebook="01_memory_scaling", params={"N_AGENTS": [2]}, sweep=sweep)
    found = points(Grid(defaults={"MODEL": "m"}, points=[entry, entry]))
    assert [p.label for p in found] == [
        f"01_memory_scaling SEED={s} ROUNDS={r}" for s in (0, 1) for r in (2, 3)
    ]
    assert {p.chosen.model_dump()["MODEL"] for p in found} == {"m"}
    assert {tuple(p.chosen.model_dump()["N_AGENTS"]) for p in found} == {(2,)}


def test_labels_tell_the_points_of_a_grid_apart() -> None:
    found = points(load_grid(GRIDS / "offline-full.yaml"), only=["04", "08", "09"])
    labels = [p.label for p in found]
    assert len(set(labels)) == len(labels)
    assert labels[:2] == ["04_longbench_recovery", "04_longbench_recovery QUESTION=visible"]


def test_only_chooses_by_notebook_or_experiment() -> None:
    grid = load_grid(GRIDS / "smoke.yaml")
    assert [p.source.stem for p in points(grid, only=["02"])] == ["02_ppl_inversion"]
    assert [p.source.stem for p in points(grid, only=["agent_fidelity"])] == ["03_agent_fidelity"]
    with pytest.raises(
        ParameterError, match="99 matches no notebook of the grid: 00_start"
    ) as caught:
        points(grid, only=["99"])
    assert "and no experiment: memory_scaling, ppl_inversion, agent_fidelity" in str(caught.value)


def test_overrides_win_where_the_name_exists() -> None:
    found = points(load_grid(GRIDS / "smoke.yaml"), overrides={"N_DOCS": "2"})
    given = {p.source.stem: p.chosen.model_dump().get("N_DOCS") for p in found}
    assert given["02_ppl_inversion"] == given["03_agent_fidelity"] == 2
    assert given["01_memory_scaling"] is None


@pytest.mark.parametrize(
    ("grid", "overrides", "said"),
    [
        (
            {"points": [{"notebook": "01_memory_scaling"}]},
            {"CONTEXT_TOKEN": 1},
            "did you mean CONTEXT_TOKENS",
        ),
        (
            {"points": [{"notebook": "01_memory_scaling"}]},
            {"N_DOCS": 1},
            "unknown parameter N_DOCS",
        ),
        ({"points": [{"notebook": "01_memory"}]}, {}, "did you mean 01_memory_scaling"),
        (
            {"points": [{"notebook": "01_memory_scaling", "params": {"SEEDS": 1}}]},
            {},
            "did you mean SEED",
        ),
        (
            {"points": [{"notebook": "01_memory_scaling", "sweep": {"SEED": [0, -1]}}]},
            {},
            "SEED=-1",
        ),
        (
            {"points": [{"notebook": "01_memory_scaling"}], "defaults": {"SED": 1}},
            {},
            "did you mean SEED",
        ),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    grid: dict[str, Any], overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(ParameterError, match=said):
        points(Grid.model_validate(grid), overrides=overrides)


def test_a_file_that_is_no_grid_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("points: [{notebok: x}]")
    (tmp_path / "worse.yaml").write_text("points: [")
    for name in ("bad", "worse"):
        with pytest.raises(
            ParameterError, match=f"{name}.yaml is not a grid of defaults and points"
        ) as caught:
            load_grid(tmp_path / f"{name}.yaml")
        assert "\n" not in str(caught.value)
    with pytest.raises(
        ParameterError,
        match=r"no profile 'offlne' in .*Known: bench-gpu, offline, offline-full, smoke, t4, t4-8b",
    ):
        load_grid(GRIDS / "offlne.yaml")
