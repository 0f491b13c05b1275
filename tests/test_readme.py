"""The README keeps its word: its code runs, its commands, files and parameters exist."""

import re
import shlex
import sys
from pathlib import Path
from subprocess import run

import nbformat
import pytest
from typer.main import get_command

from polykv_lib.study.cli import app
from polykv_lib.study.tables import BEGIN, END

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(program: str, text: str = README) -> list[list[str]]:
    """Arguments of every line of a shell block, and every inline code, that starts with a program."""
    lines = [line for block in blocks("sh", text) for line in block.splitlines()]
    lines += re.findall(rf"`({program} [^`]+)`", text)
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == [program]]


def unknown_words(arguments: list[str]) -> list[str]:
    """What `polykv` would not understand of these arguments: a command, an option or a profile."""
    command, rest = get_command(app), arguments
    while hasattr(command, "commands"):
        name, *rest = rest
        if name not in command.commands:
            return [name]
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    wrong = [word for word in rest if word.startswith("--") and word not in options]
    if "--profile" in rest:
        profile = rest[rest.index("--profile") + 1]
        wrong += [] if (ROOT / "env" / "grids" / f"{profile}.yaml").is_file() else [profile]
    return wrong


def missing_of_papermill(arguments: list[str]) -> list[str]:
    """The notebook or the parameters that a papermill line names and that do not exist."""
    notebook = ROOT / arguments[0]
    if not notebook.is_file():
        return [arguments[0]]
    cells = nbformat.read(notebook, as_version=4).cells
    cell = next(c.source for c in cells if "parameters" in c.metadata.get("tags", []))
    names = [arguments[i + 1] for i, word in enumerate(arguments) if word == "-p"]
    return [name for name in names if not re.search(rf"^{name}:", cell, re.MULTILINE)]


def printed_by(code: str) -> list[str]:
    """What a reader sees who pastes the code into a fresh Python; a warning is an error."""
    done = run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_quick_start_is_eleven_lines_and_what_follows_it_goes_on_from_there() -> None:
    code, _, plan, generate = blocks("python")
    assert len([line for line in code.splitlines() if line.strip()]) == 11
    first, *answers, evicted, answer, generated = printed_by(code + plan + generate)
    assert generated
    assert answer
    smaller = [float(line.split(" x below")[0].split(",")[-1]) for line in (first, evicted)]
    assert smaller[0] > 2.5
    assert smaller[1] > 10
    assert evicted.startswith("11520 tokens in all layers")
    assert sum(line.startswith("- ") and len(line) > 10 for line in answers) == 2


def test_a_codec_and_a_pool_work_without_a_model() -> None:
    bits, pool = printed_by(blocks("python")[1])
    assert bits == "3.125 bits a number"
    assert pool.endswith("(1024, 1024)")


@pytest.mark.parametrize("arguments", commands("polykv"), ids=" ".join)
def test_every_polykv_command_exists(arguments: list[str]) -> None:
    assert not unknown_words(arguments)


@pytest.mark.parametrize("arguments", commands("papermill"), ids=" ".join)
def test_every_papermill_line_names_a_notebook_and_its_parameters(arguments: list[str]) -> None:
    assert not missing_of_papermill(arguments)


def test_every_make_target_exists() -> None:
    targets = [words[0] for words in commands("make")]
    assert {"study", "test"} <= set(targets)
    makefile = (ROOT / "Makefile").read_text()
    assert not [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)]


def test_the_checks_above_can_fail() -> None:
    assert unknown_words(["draw"]) == ["draw"]
    assert unknown_words(["run", "--profile", "t5", "--fast"]) == ["--fast", "t5"]
    assert missing_of_papermill(["notebooks/99.ipynb"]) == ["notebooks/99.ipynb"]
    line = ["notebooks/02_ppl_inversion.ipynb", "out.ipynb", "-p", "N_DOC", "4"]
    assert missing_of_papermill(line) == ["N_DOC"]


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    gone = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not gone


def test_results_stand_between_their_markers() -> None:
    assert README.count(BEGIN) == README.count(END) == 1
    assert README.index(BEGIN) < README.index(END)
