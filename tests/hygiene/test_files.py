"""Habits of this repository that a linter cannot express: files, imports, pins, citation."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MODULES = sorted(ROOT.glob("polykv_lib/**/*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

MACHINE_PATHS = r"/(?:work|root|tmp/\w+|home/\w+|opt/\w+)/\w|[A-Z]:\\Users"
PACKAGE_HOSTS = (
    r"index-url|find-links|(?:py|conda|packages|wheels|artifact|python)\w*\.(?:org|com)\b"
)


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def requirements(*names: str) -> Iterator[Requirement]:
    for name in names:
        for line in (ROOT / "env" / name).read_text().splitlines():
            if line and not line.startswith(("#", "-")):
                yield Requirement(line)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_fits_in_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 250, f"{path.name}: split it along a concept"


def test_tracked_files_name_no_machine_and_no_package_host() -> None:
    forbidden = re.compile(f"{MACHINE_PATHS}|{PACKAGE_HOSTS}")
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in {".png", ".pdf"}:
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [
            f"{path.relative_to(ROOT)}:{n}: {line.strip()[:100]}"
            for n, line in enumerate(lines, 1)
            if forbidden.search(line)
        ]
    assert not found, "\n".join(found)


def test_no_tracked_file_is_large() -> None:
    large = [p.name for p in tracked() if p.stat().st_size > 2_000_000]
    assert not large, f"{large}: results are small JSON files; models and texts come from wheels"


def imported_by(path: Path) -> set[str]:
    """Top-level names a module imports, wherever in the file the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"polykv_lib"}


def test_every_import_of_the_library_is_declared() -> None:
    listed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dask"]]
    declared = {canonicalize_name(Requirement(text).name) for text in listed}
    homes = packages_distributions()
    for path in MODULES:
        for name in imported_by(path):
            owners = {canonicalize_name(owner) for owner in homes.get(name, [name])}
            assert owners & declared, f"{path.name} imports {name}: add it to pyproject.toml"


def test_every_dependency_is_pinned_above_its_floor() -> None:
    pins = {
        canonicalize_name(r.name): next(iter(r.specifier)).version
        for r in requirements("requirements.txt")
    }
    for text in PROJECT["dependencies"]:
        floor = Requirement(text)
        pin = pins.pop(canonicalize_name(floor.name), None)
        assert pin, f"{floor.name} is a dependency without a pin in env/requirements.txt"
        assert floor.specifier.contains(pin), f"{floor.name}=={pin} is below {floor.specifier}"
    assert not pins, f"{sorted(pins)} are pinned in env/requirements.txt but not dependencies"


def test_pins_and_constraints_agree() -> None:
    frozen = {canonicalize_name(r.name): r.specifier for r in requirements("constraints.txt")}
    for pin in requirements("requirements.txt", "requirements-dev.txt", "requirements-kaggle.txt"):
        assert frozen[canonicalize_name(pin.name)] == pin.specifier, pin.name


def test_conda_environment_names_every_dependency() -> None:
    *conda, pip = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    named = {re.split(r"[>=<]", text)[0] for text in [*conda, *pip["pip"]]}
    wanted = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    # PyTorch has another name in conda; jupyterlab brings the notebook kernel.
    missing = wanted - named - {"torch", "ipykernel"}
    assert not missing, f"environment.yml lacks {sorted(missing)}"
    assert {"pytorch-cpu", "jupyterlab"} <= named


def test_citation_is_valid_and_cites_the_three_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert all(citation[key] for key in ("message", "title", "authors", "license"))
    assert citation["version"] == PROJECT["version"]
    cited = {ref["identifiers"][0]["value"] for ref in citation["references"]}
    assert cited == {"arXiv:2604.24971", "arXiv:2606.15157", "arXiv:2504.19874"}
    for entry in citation["references"]:
        assert all(entry[key] for key in ("type", "title", "authors", "year")), entry["title"]
        assert all(a["family-names"] and a["given-names"] for a in entry["authors"])
