"""What parameters are made of: strict types that read text at its meaning, and the common ones."""

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from polykv_lib.study.platform import Places
from polykv_lib.study.store import SCRATCH_PROFILE

T = TypeVar("T")


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


def near(name: str, known: Iterable[str]) -> str:
    """The known name nearest to a misspelt one, as a question that ends the sentence, else "."."""
    by_capitals = {k.upper(): k for k in known}
    found = difflib.get_close_matches(name.upper(), by_capitals, n=1)
    return f"; did you mean {by_capitals[found[0]]}?" if found else "."


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
Positive = Annotated[int | float, BeforeValidator(parse), Field(gt=0)]
FloatDtype = Literal["float32", "bfloat16", "float16"]
Dtype = Literal["auto", FloatDtype]
Bits = Annotated[int | float, BeforeValidator(parse), Field(gt=0, le=32)]
Share = Annotated[float, BeforeValidator(parse), Field(gt=0, lt=1)]
Flag = Annotated[bool, BeforeValidator(parse)]
Text = Annotated[str, BeforeValidator(_text)]
NonEmpty = Annotated[Text, Field(min_length=1)]
SeveralOrNone = Annotated[list[T], BeforeValidator(_list)]
Several = Annotated[list[T], BeforeValidator(_list), Field(min_length=1)]


def _codec(name: str) -> str:
    from polykv_lib import presets  # here, because it imports torch

    presets.codec(name)
    return name


def _geometry(name: str) -> str:
    from polykv_lib import presets

    presets.geometry(name)
    return name


def _policy(name: str) -> str:
    from polykv_lib.study.experiments.eviction.items import METHODS

    if name not in METHODS:
        raise ValueError(f"no policy {name!r}; choose one of: {', '.join(METHODS)}.")
    return name


def _candidate(name: str) -> str:
    from polykv_lib.study.experiments.eviction.items import POLICIES

    if name not in POLICIES:
        raise ValueError(f"{name!r} can not stand in a plan; choose from: {', '.join(POLICIES)}.")
    return name


def _answering(name: str) -> str:
    from polykv_lib.study.experiments.eviction.items import METHODS
    from polykv_lib.study.experiments.eviction.plans import LEVELS, PAPER_B, PPL_BUDGETS

    known = (*METHODS, PAPER_B, PPL_BUDGETS, *LEVELS)
    if name not in known:
        raise ValueError(f"no policy or plan {name!r}; choose from: {', '.join(known)}.")
    return name


def _control(name: str) -> str:
    from polykv_lib.study.experiments.inversion.controls import control

    control(name)
    return name


def _key_option(name: str) -> str:
    _codec(f"{name}+full")
    return name


def _value_option(name: str) -> str:
    _codec(f"full+{name}")
    return name


KeyOptions = Several[Annotated[Text, AfterValidator(_key_option)]]
ValueOptions = Several[Annotated[Text, AfterValidator(_value_option)]]
Codecs = Several[Annotated[Text, AfterValidator(_codec)]]
Controls = Several[Annotated[Text, AfterValidator(_control)]]
OneGeometry = Annotated[Text, AfterValidator(_geometry)]
Geometries = Several[OneGeometry]
Policies = Several[Annotated[Text, AfterValidator(_policy)]]
Answering = SeveralOrNone[Annotated[Text, AfterValidator(_answering)]]
Candidates = Several[Annotated[Text, AfterValidator(_candidate)]]


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

    # Parameters younger than the first stored points, at the value that changes nothing.
    added: ClassVar[dict[str, Any]] = {}

    MODEL: NonEmpty
    SEED: CountOrZero
    FORCE: Flag
    TIME_BUDGET_MIN: Minutes

    @property
    def resolved(self) -> dict[str, Any]:
        """The parameters that decide the numbers, and so the key."""
        idle = {name for name, value in self.added.items() if getattr(self, name) == value}
        return self.model_dump(exclude={"PROFILE", "OUT_DIR", "FORCE", "TIME_BUDGET_MIN"} | idle)
