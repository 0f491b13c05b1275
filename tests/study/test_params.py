"""Parameters as people and papermill really pass them: taken at their meaning or refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from polykv_lib.study import grid, params
from polykv_lib.study.params import ParameterError, validate

ROOT = Path(__file__).parents[2]
MEMORY = grid.notebook_defaults(ROOT / "notebooks" / "01_memory_scaling.ipynb")


def chosen(**changes: Any) -> Any:
    return validate("01_memory_scaling", MEMORY | changes)


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("FORCE", "false", False),
        ("FORCE", "False", False),
        ("FORCE", "true", True),
        ("N_AGENTS", "[1, 3]", [1, 3]),
        ("N_AGENTS", 10.0, [10]),  # papermill's reading of 1e1
        ("N_AGENTS", "1e1", [10]),
        ("N_AGENTS", (1, 3), [1, 3]),
        ("CODECS", "[paper, polykv]", ["paper", "polykv"]),
        ("CODECS", "paper", ["paper"]),
        ("MODEL", 8, "8"),
        ("SEED", "7", 7),
        ("TIME_BUDGET_MIN", "2.5", 2.5),
    ],
)
def test_text_is_taken_as_the_value_it_spells(name: str, given: Any, meant: Any) -> None:
    value = getattr(chosen(**{name: given}), name)
    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("FORCE", "maybe", "FORCE='maybe': input should be a valid boolean"),
        ("FORCE", 1, "FORCE=1: input should be a valid boolean"),
        ("SEED", True, "SEED=True: input should be a valid integer"),
        ("SEED", -1, "SEED=-1: input should be greater than or equal to 0"),
        ("SEED", 1.5, "SEED=1.5: input should be a valid integer"),
        ("SEED", float("nan"), "SEED=nan: input should be a valid integer"),
        ("N_AGENTS", [3, 0], "N_AGENTS[1]=0: input should be greater than or equal to 1"),
        ("N_AGENTS", [], "N_AGENTS=[]: it may not be empty"),
        ("N_AGENTS", None, "N_AGENTS[0]=None: input should be a valid integer"),
        ("MODEL", "", "MODEL='': it may not be empty"),
        ("PROFILE", "../x", "PROFILE='../x': string should match pattern"),
        ("CODECS", ["papper"], "CODECS[0]='papper': no codec 'papper'; did you mean 'paper'?"),
        (
            "GEOMETRIES",
            ["llama3"],
            "GEOMETRIES[0]='llama3': no geometry 'llama3'; did you mean 'llama-3-8b'?",
        ),
    ],
)
def test_a_bad_value_is_refused_in_one_line(name: str, given: Any, said: str) -> None:
    with pytest.raises(ParameterError) as caught:
        chosen(**{name: given})
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_a_misspelt_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        ParameterError, match="unknown parameter CONTEXT_TOKEN; did you mean CONTEXT_TOKENS"
    ):
        chosen(CONTEXT_TOKEN=[256])
    with pytest.raises(
        ParameterError, match="SEED has no value; the parameters cell of notebooks/01_memory"
    ):
        validate("01_memory_scaling", {k: v for k, v in MEMORY.items() if k != "SEED"})
    with pytest.raises(
        ParameterError,
        match=r"unknown notebook '01_memory'; did you mean 01_memory_scaling\? Known: 00_",
    ):
        validate("01_memory", MEMORY)


@pytest.mark.parametrize("name", ["CONTEXT_TOKEN", "N_AGENT", "seed"])
def test_a_bare_papermill_run_notices_misspelt_globals(name: str) -> None:
    namespace = {"In": [], "__name__": "__main__", "notebook": params, "_i1": "", **MEMORY, name: 3}
    with pytest.raises(ParameterError, match=f"unknown parameter {name}; did you mean"):
        validate("01_memory_scaling", params.from_namespace("01_memory_scaling", namespace))


def test_only_what_decides_the_numbers_enters_the_key() -> None:
    where = {"PROFILE": "other", "OUT_DIR": "elsewhere", "FORCE": True, "TIME_BUDGET_MIN": 5}
    assert chosen(**where).resolved == chosen().resolved
    assert chosen(SEED=1).resolved != chosen().resolved


def test_smoke_tables_stay_out_of_the_published_folder() -> None:
    for profile, inside in (("smoke", "data/runs/smoke/figures"), ("auto", "figures")):
        values = {"PROFILE": profile, "OUT_DIR": "/out"}
        assert validate("10_paper_vs_ours", values).figures == Path("/out").resolve() / inside
