"""The parameters of each notebook: strict types, choices and ranges, and errors of one line."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from polykv_lib.study.platform import Places
from polykv_lib.study.store import SCRATCH_PROFILE

T = TypeVar("T")
NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class ParameterError(ValueError):
    """A parameter that is unknown or has a value it may not have; the text is one line."""


def parse(value: Any) -> Any:
    """Text as the value it spells: "false" is False, "1e1" is 10.0, "[1, 3]" is a list."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return value


def _whole(value: Any) -> Any:
    value = parse(value)
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _list(value: Any) -> Any:
    value = parse(value)
    return list(value) if isinstance(value, list | tuple) else [value]


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
CountOrZero = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Minutes = Annotated[int | float, BeforeValidator(parse), Field(ge=0)]
Flag = Annotated[bool, BeforeValidator(parse)]
Text = Annotated[str, BeforeValidator(_text)]
NonEmpty = Annotated[Text, Field(min_length=1)]
Several = Annotated[list[T], BeforeValidator(_list), Field(min_length=1)]


def _codec(name: str) -> str:
    from polykv_lib import presets  # here, because it imports torch

    presets.codec(name)
    return name


def _geometry(name: str) -> str:
    from polykv_lib import presets

    presets.geometry(name)
    return name


Codecs = Several[Annotated[Text, AfterValidator(_codec)]]
Geometries = Several[Annotated[Text, AfterValidator(_geometry)]]


class Parameters(BaseModel):
    """What every notebook takes; the defaults are in the notebooks' `parameters` cells alone."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    experiment: ClassVar[str] = ""  # empty: the notebook reads results and computes none

    PROFILE: Annotated[Text, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
    OUT_DIR: Text

    @property
    def places(self) -> Places:
        """Where this run reads and writes."""
        return Places.at(self.OUT_DIR)

    @property
    def results(self) -> Path:
        """The stored results to read: of PROFILE alone, or of every profile if it is "auto"."""
        results = self.places.results
        return results if self.PROFILE == "auto" else results / self.PROFILE

    @property
    def figures(self) -> Path:
        """Where tables and figures go; those of smoke results stay out of the published folder."""
        scratch = self.places.runs / SCRATCH_PROFILE / "figures"
        return scratch if self.PROFILE == SCRATCH_PROFILE else self.places.figures


class ExperimentParameters(Parameters):
    """What every notebook with an experiment takes."""

    MODEL: NonEmpty
    SEED: CountOrZero
    FORCE: Flag
    TIME_BUDGET_MIN: Minutes

    @property
    def resolved(self) -> dict[str, Any]:
        """The parameters that decide the numbers, and so the key."""
        return self.model_dump(exclude={"PROFILE", "OUT_DIR", "FORCE", "TIME_BUDGET_MIN"})


class MemoryScaling(ExperimentParameters):
    """Bytes of the pool and of each agent, and the time of a decode step."""

    experiment = "memory_scaling"

    CONTEXT_TOKENS: Several[Count]
    N_AGENTS: Several[Count]
    GEOMETRIES: Geometries
    CODECS: Codecs
    MEASURED_TOKENS: Several[Count]
    STEP_TOKENS: Several[Count]
    STEP_AGENTS: Several[Count]
    ROUNDS: Count


class PplInversion(ExperimentParameters):
    """Perplexity and agreement under the pool, by prefix length and codec."""

    experiment = "ppl_inversion"

    PROTOCOLS: Several[Literal["paper-70-30", "fixed-window"]]
    PREFIX_TOKENS: Several[Count]
    N_DOCS: Count
    SCORED_TOKENS: Count
    CODECS: Codecs
    FRONTIER_CODECS: Codecs
    FRONTIER_TOKENS: CountOrZero
    N_BOOT: Count


class AgentFidelity(ExperimentParameters):
    """Answers of agents that share a pool, beside their full-precision answers."""

    experiment = "agent_fidelity"

    N_AGENTS: Several[Count]
    CONTEXT_TOKENS: Several[Count]
    N_DOCS: Count
    CODECS: Codecs
    MAX_NEW_TOKENS: Count
    ENCODER: NonEmpty


class Figures(Parameters):
    """Figures from stored results."""

    FORMATS: Several[Literal["pdf", "png"]]


NOTEBOOKS: dict[str, type[Parameters]] = {
    "00_start_here": Parameters,
    "01_memory_scaling": MemoryScaling,
    "02_ppl_inversion": PplInversion,
    "03_agent_fidelity": AgentFidelity,
    "06_paper_vs_ours": Parameters,
    "07_figures": Figures,
}


def validate(notebook: str, values: Mapping[str, Any]) -> Parameters:
    """Values of a notebook's parameters as its checked, immutable parameter object.

    Text that spells a value of the right type is taken as that value, since papermill's `-p` passes
    `false` and `[1,3]` as text.

    Raises:
        ParameterError: unknown notebook or name, missing or bad value; one line.
    """
    schema = schema_of(notebook)
    for name in values:
        refuse_unknown(name, schema.model_fields, notebook)
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        raise ParameterError(_one_line(error, notebook)) from None


def schema_of(notebook: str) -> type[Parameters]:
    """The parameter class of a notebook, by file name without suffix."""
    if notebook not in NOTEBOOKS:
        hint = near(notebook, NOTEBOOKS)
        raise ParameterError(f"unknown notebook {notebook!r}{hint}. Known: {', '.join(NOTEBOOKS)}")
    return NOTEBOOKS[notebook]


def all_names() -> list[str]:
    """The parameter names of all notebooks together."""
    return list(
        dict.fromkeys(name for schema in NOTEBOOKS.values() for name in schema.model_fields)
    )


def from_namespace(notebook: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters among a notebook's globals, the misspelt ones too, for `validate` to refuse.

    A global counts as a parameter if its name is in capitals, or would be a parameter in capitals.
    """
    fields = schema_of(notebook).model_fields
    return {
        name: value
        for name, value in namespace.items()
        if NAME.fullmatch(name) or name.upper() in fields
    }


def refuse_unknown(name: str, known: Iterable[str], where: str) -> None:
    """Raises a ParameterError that proposes the nearest name, unless the name is known."""
    if name not in known:
        raise ParameterError(
            f"unknown parameter {name}{near(name, known)}. {where} takes {', '.join(known)}"
        )


def near(name: str, known: Iterable[str]) -> str:
    """The known name nearest to a misspelt one, as a question to append; empty if none is near."""
    by_capitals = {k.upper(): k for k in known}
    found = difflib.get_close_matches(name.upper(), by_capitals, n=1)
    return f"; did you mean {by_capitals[found[0]]}?" if found else ""


def _one_line(error: ValidationError, notebook: str) -> str:
    first = error.errors()[0]
    name, *place = first["loc"]
    if first["type"] == "missing":
        return f"{name} has no value; the parameters cell of notebooks/{notebook}.ipynb sets it"
    inside = "".join(f"[{index}]" for index in place)
    empty = first["type"] == "too_short"
    said = "it may not be empty" if empty else first["msg"].removeprefix("Value error, ")
    return f"{name}{inside}={first['input']!r}: {said[0].lower()}{said[1:]}"
