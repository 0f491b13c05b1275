"""Grids: which notebooks one profile runs, with which parameters."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import papermill
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polykv_lib.study import params as parameters
from polykv_lib.study.notebook import profile_of
from polykv_lib.study.params import ExperimentParameters, ParameterError, Parameters
from polykv_lib.study.platform import repository
from polykv_lib.study.store import key_of

SHORT: Final = 40  # characters of a value that a point's label may show


class Entry(BaseModel):
    """One notebook of a grid: fixed `params`, and `sweep`, a list of values a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    notebook: str
    params: dict[str, Any] = Field(default_factory=dict)
    sweep: dict[str, list[Any]] = Field(default_factory=dict)


class Grid(BaseModel):
    """What one profile runs. `defaults` go to every notebook that has the name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    defaults: dict[str, Any] = Field(default_factory=dict)
    points: list[Entry]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of one notebook; `label` names it in progress lines."""

    source: Path
    label: str
    chosen: Parameters

    @property
    def key(self) -> str | None:
        """The key its record is stored under; None for a notebook that only reads results."""
        if not isinstance(self.chosen, ExperimentParameters):
            return None
        return key_of(self.chosen.experiment, self.chosen.resolved)

    @property
    def executed(self) -> Path:
        """Where the executed copy goes."""
        name = "__".join(filter(None, (self.source.stem, self.key)))
        return self.chosen.places.runs / profile_of(self.chosen) / f"{name}.ipynb"


def load_grid(file: Path) -> Grid:
    """A grid file, checked.

    Raises:
        ParameterError: no such profile, or not a grid; one line.
    """
    if not file.is_file():
        known = ", ".join(sorted(f.stem for f in file.parent.glob("*.yaml"))) or "none"
        raise ParameterError(f"no profile {file.stem!r} in {file.parent}. Known: {known}")
    try:
        return Grid.model_validate(yaml.safe_load(file.read_text()))
    except (ValidationError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise ParameterError(f"{file.name} is not a grid of defaults and points: {said}") from None


def is_point(profile: str, experiment: str, key: str) -> bool:
    """Whether the grid of a profile holds a point; a profile without a grid holds any."""
    root = repository()
    path = None if root is None else root / "env" / "grids" / f"{profile}.yaml"
    if root is None or path is None or not path.is_file():
        return True
    try:
        grid = load_grid(path)
        points = expand(grid, root / "notebooks", profile, only=[experiment])
    except (ValueError, SyntaxError):  # a grid or a parameters cell that someone is editing, too
        return False
    return any(point.key == key for point in points)


def notebook_defaults(source: Path) -> dict[str, Any]:
    """The literals of a notebook's `parameters` cell, by name."""
    found = papermill.inspect_notebook(source)
    return {name: ast.literal_eval(about["default"]) for name, about in found.items()}


def expand(
    grid: Grid,
    notebooks: Path,
    profile: str,
    *,
    only: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> list[Point]:
    """The points of a grid in its order, each with checked parameters; equal points appear once.

    Args:
        grid: what to run.
        notebooks: folder of the source notebooks.
        profile: PROFILE of every point that computes.
        only: beginnings of notebook names, or names of experiments; empty for all.
        overrides: values that win over the grid's, in every chosen notebook that has the name.

    Raises:
        ParameterError: an unknown name or a bad value, before anything is run.
    """
    overrides = overrides or {}
    entries = [entry for entry in grid.points if _chosen(entry.notebook, only)]
    if not entries:
        known = list(dict.fromkeys(entry.notebook for entry in grid.points))
        experiments = filter(None, (parameters.schema_of(name).experiment for name in known))
        raise ParameterError(
            f"{' '.join(only)} matches no notebook of the grid: {', '.join(known)}; "
            f"and no experiment: {', '.join(experiments)}. Other profiles, such as "
            "offline-full, hold more: --profile."
        )
    schemas = [parameters.schema_of(entry.notebook) for entry in entries]
    names = dict.fromkeys(name for schema in schemas for name in schema.model_fields)
    for name in overrides:
        parameters.refuse_unknown(name, names, "This run")
    for name in grid.defaults:
        parameters.refuse_unknown(name, parameters.all_names(), "A grid")
    points = [
        point
        for entry in entries
        for point in _points(grid, entry, notebooks, profile, overrides, _differing(entry, entries))
    ]
    return list({(p.source, p.chosen.model_dump_json()): p for p in points}.values())


def _chosen(notebook: str, only: Sequence[str]) -> bool:
    experiment = parameters.schema_of(notebook).experiment
    return not only or any(notebook.startswith(o) or experiment == o for o in only)


def _differing(entry: Entry, entries: Sequence[Entry]) -> dict[str, Any]:
    """What an entry sets otherwise than another of its notebook; long lists are left out."""
    others = [other.params for other in entries if other.notebook == entry.notebook]
    return {
        name: value
        for name, value in entry.params.items()
        if any(other.get(name) != value for other in others) and len(str(value)) <= SHORT
    }


def _points(
    grid: Grid,
    entry: Entry,
    notebooks: Path,
    profile: str,
    overrides: Mapping[str, Any],
    differing: Mapping[str, Any],
) -> list[Point]:
    schema = parameters.schema_of(entry.notebook)
    source = notebooks / f"{entry.notebook}.ipynb"
    shared = {k: v for k, v in grid.defaults.items() if k in schema.model_fields}
    given = {k: v for k, v in overrides.items() if k in schema.model_fields}
    computes = issubclass(schema, ExperimentParameters)
    base = notebook_defaults(source) | ({"PROFILE": profile} if computes else {}) | shared
    points = []
    for values in product(*entry.sweep.values()):
        swept = dict(zip(entry.sweep, values, strict=True))
        chosen = parameters.validate(entry.notebook, base | entry.params | swept | given)
        told = {name: given.get(name, value) for name, value in (dict(differing) | swept).items()}
        label = " ".join([entry.notebook, *(f"{name}={value}" for name, value in told.items())])
        points.append(Point(source=source, label=label, chosen=chosen))
    return points
