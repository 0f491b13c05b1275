"""Folders that `kaggle kernels push` takes: one a point, and the library's wheel as a dataset."""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat
from packaging.requirements import Requirement
from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

from polykv_lib.study.estimate import TWO_T4, estimate
from polykv_lib.study.grid import Point
from polykv_lib.study.params import ExperimentParameters, ParameterError, near
from polykv_lib.study.platform import EMBEDDED_MODEL, PlatformError, check_writable
from polykv_lib.study.provenance import git_remote

MACHINE = "NvidiaTeslaT4"  # two of them; asking for a GPU alone may give one that torch cannot use
IMAGE_PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
WHEELS = "polykv-lib-wheels"
NOBODY = "YOUR-KAGGLE-NAME"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a pushed kernel is attached to and may do."""

    owner: str  # Kaggle account, or the placeholder
    internet: bool = True
    models: tuple[str, ...] = ()  # owner/model/framework/variation/version; empty: the known copy
    kernels: tuple[str, ...] = ()  # owner/slug of kernels whose stored results are read

    def __post_init__(self) -> None:
        for given, parts, form in (
            *((model, 5, "owner/model/framework/variation/version") for model in self.models),
            *((kernel, 2, "owner/slug") for kernel in self.kernels),
            (self.owner, 1, "an account's name"),
        ):
            names = given.split("/")
            if len(names) != parts or not all(map(NAME.fullmatch, names)):
                raise ParameterError(f"{given!r} names nothing on Kaggle; pass {form}")


def owner_of(root: Path) -> str:
    """The owner of the checkout's GitHub remote, else a placeholder."""
    return (git_remote(root) or NOBODY).split("/")[0]


def pick(points: Sequence[Point], keys: Sequence[str], profile: str) -> list[Point]:
    """The points whose keys begin so, or all that compute.

    Raises:
        ParameterError: a key that fits none of them, or none that computes is left.
    """
    known = {point.key: point for point in points if point.key}
    for key in keys:
        if not key or not any(name.startswith(key) for name in known):
            raise ParameterError(
                f"no point {key!r} here{near(key, known)} `polykv run --profile {profile} "
                "--dry-run` lists the keys"
            )
    found = [p for k, p in known.items() if not keys or any(k.startswith(key) for key in keys)]
    if not found:
        raise ParameterError("these notebooks only read results; choose one that computes")
    return found


def export(folder: Path, points: Sequence[Point], root: Path, options: Options) -> list[str]:
    """Writes one folder a point and one for the wheels.

    Args:
        folder: new or empty.
        points: points that compute.
        root: the checkout.
        options: account, network and what to attach.

    Returns:
        Lines that say what to do next.

    Raises:
        PlatformError: the folder is not empty or cannot be written, or pip fails.
        DoesNotFit: a point needs more than two T4s.
        ParameterError: without internet, a model of which no copy on Kaggle is known.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PlatformError(
            f"{folder} is {'not empty' if folder.is_dir() else 'a file'}; name a new folder"
        )
    check_writable(folder)
    kernels = [_kernel(point, options) for point in points]
    with tempfile.TemporaryDirectory() as made:
        for point, (slug, about) in zip(points, kernels, strict=True):
            _write(Path(made, slug, "kernel-metadata.json"), about)
            nbformat.write(_notebook(point, root), Path(made, slug, about["code_file"]))
        licence = [{"name": "other"}]  # each wheel brings its own
        dataset = {"title": WHEELS, "id": f"{options.owner}/{WHEELS}", "licenses": licence}
        _write(Path(made, WHEELS, "dataset-metadata.json"), dataset)
        _build(root, Path(made, WHEELS))
        if not options.internet:
            four_bit = any(_model(point).endswith("@4bit") for point in points)
            _fetch(root, Path(made, WHEELS), ["bitsandbytes"] if four_bit else [])
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return list(_next_steps(folder, [slug for slug, _ in kernels], options))


def _kernel(point: Point, options: Options) -> tuple[str, dict[str, Any]]:
    from polykv_lib.hf.models.sources import kaggle_handle  # here, because it imports torch

    model = _model(point)
    embedded = model == EMBEDDED_MODEL
    if isinstance(point.chosen, ExperimentParameters) and not embedded:
        expected = estimate(point.chosen, TWO_T4)
        if expected is not None:
            expected.checked()
    models = list(options.models) or list(filter(None, [kaggle_handle(model)]))
    if not (options.internet or models or embedded):
        raise ParameterError(
            f"no copy of {model} on Kaggle is known: without internet, name one by --model-source "
            "owner/model/framework/variation/version"
        )
    title = f"polykv {point.source.stem.replace('_', ' ')} {str(point.key)[:8]}"
    slug = title.replace(" ", "-")  # Kaggle makes the same of the title
    return slug, {
        "id": f"{options.owner}/{slug}",
        "title": title,
        "code_file": f"{point.source.stem}.ipynb",
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": not embedded,
        "enable_internet": options.internet,
        **({} if embedded else {"machine_shape": MACHINE}),
        "dataset_sources": [f"{options.owner}/{WHEELS}"],
        "competition_sources": [],
        "kernel_sources": list(options.kernels),
        "model_sources": models,
    }


def _model(point: Point) -> str:
    return str(getattr(point.chosen, "MODEL", EMBEDDED_MODEL))


def _notebook(point: Point, root: Path) -> nbformat.NotebookNode:
    """The point's notebook with its parameters injected, after a cell that installs the library."""
    source = load_notebook_node(str(point.source))
    book = parameterize_notebook(source, point.chosen.model_dump())
    book.metadata.pop("papermill", None)
    cell = (root / "env" / "kaggle" / "install.py").read_text()
    listed = [*_names(root), *(["bitsandbytes"] if _model(point).endswith("@4bit") else [])]
    line = next(text for text in cell.splitlines() if text.startswith("names = "))
    cell = cell.replace(line, f"names = {json.dumps(['polykv-lib', *listed])}")
    book.cells.insert(1, nbformat.v4.new_code_cell(cell.rstrip(), id="install"))
    return book


def _lists(root: Path) -> list[Path]:
    return [root / "env" / f"requirements-{name}.txt" for name in ("kaggle", "offline")]


def _names(root: Path) -> list[str]:
    lines = [line for file in _lists(root) for line in file.read_text().splitlines()]
    wanted = [Requirement(line).name for line in lines if line and line[0] not in "#-"]
    return [name.lower().replace("_", "-") for name in wanted]


def _build(root: Path, wheels: Path) -> None:
    here = ["--no-build-isolation"] if find_spec("hatchling") else []
    _pip("wheel", "--no-deps", *here, "--wheel-dir", str(wheels), str(root))


def _fetch(root: Path, wheels: Path, more: Sequence[str]) -> None:
    """Wheels for Kaggle's Python; what exists as source alone is made into one."""
    image = [part for name in PLATFORMS for part in ("--platform", name)]
    lists = [part for file in _lists(root) for part in ("-r", str(file))]
    target = ["--python-version", IMAGE_PYTHON, *image, "--dest", str(wheels)]
    _pip("download", "--no-deps", *target, *lists, *more)
    for source in [f for f in wheels.iterdir() if f.name.endswith((".tar.gz", ".zip"))]:
        _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(source))
        source.unlink()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise PlatformError(f"`pip {' '.join(arguments)}` failed: {lines[-1]}")


def _next_steps(folder: Path, slugs: Sequence[str], options: Options) -> Iterator[str]:
    if options.owner == NOBODY:
        yield f"Replace {NOBODY} in the metadata files by your account, or export with --owner."
    yield f"kaggle datasets create -p {folder / WHEELS}   # again later: kaggle datasets version"
    for slug in slugs:
        yield f"kaggle kernels push -p {folder / slug}"
    yield (
        f"kaggle kernels output {options.owner}/{slugs[0]} -p .   # brings data/results; "
        "--earlier attaches them to a next export"
    )
    yield "Gated models need the secret HF_TOKEN in the notebook's settings, or their Kaggle copy."


def _write(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir()
    file.write_text(json.dumps(content, indent=2) + "\n")
