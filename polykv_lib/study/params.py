"""The parameters of each notebook: choices and ranges, and errors of one line."""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from polykv_lib.study.param_types import (
    Bits,
    Candidates,
    Codecs,
    Controls,
    Count,
    CountOrZero,
    Dtype,
    ExperimentParameters,
    FloatDtype,
    Geometries,
    KeyOptions,
    NonEmpty,
    OneGeometry,
    Parameters,
    Policies,
    Positive,
    SearchedCodecs,
    Several,
    SeveralOrNone,
    Share,
    Text,
    ValueOptions,
    near,
)

__all__ = [
    "NOTEBOOKS",
    "ExperimentParameters",
    "ParameterError",
    "Parameters",
    "all_names",
    "from_namespace",
    "near",
    "refuse_unknown",
    "schema_of",
    "validate",
]

NAME = re.compile(r"[A-Z][A-Z0-9_]*")


class ParameterError(ValueError):
    """A parameter that is unknown or has a value it may not have; the text is one line."""


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


class InversionControls(ExperimentParameters):
    """Whether perplexity falls under the pool by more than noise, and what makes it move."""

    experiment = "inversion_controls"

    PREFIX_TOKENS: Several[Count]
    CONTROL_TOKENS: Count
    CONTROLS: Controls
    N_PASSAGES: Count
    SCORED_TOKENS: Count
    N_SEEDS: Count
    N_BOOT: Count


class CodecFrontier(ExperimentParameters):
    """KL against bits over a search of codecs, uniform and layer by layer."""

    experiment = "codec_frontier"

    PREFIX_TOKENS: Count
    N_PASSAGES: Annotated[Count, Field(ge=2)]
    SCORED_TOKENS: Count
    CODECS: SearchedCodecs
    KEY_OPTIONS: KeyOptions
    VALUE_OPTIONS: ValueOptions
    BUDGETS: Several[Bits]
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


class PlanRecovery(ExperimentParameters):
    """What per-layer plans win back of the quality that eviction costs."""

    experiment = "plan_recovery"

    SUITE: Literal["offline", "ruler", "longbench"]
    LONGBENCH_DIR: Text
    TASKS: Several[NonEmpty]
    N_ITEMS: Count
    N_CALIBRATION: Count
    CONTEXT_TOKENS: Count
    QUESTION: Literal["hidden", "visible"]
    KEEP: Several[Share]
    POLICIES: Policies
    CANDIDATES: Candidates
    PLANS: Several[Literal["paper-b", "gain-curve", "gain-curve-heads"]]
    CODECS: Codecs
    MAX_NEW_TOKENS: CountOrZero
    N_BOOT: Count


class PlanAblations(ExperimentParameters):
    """What makes a plan good: signals, budgets, placement, content, heads."""

    experiment = "plan_ablations"

    SUITE: Literal["offline", "ruler"]
    TASKS: Several[NonEmpty]
    N_ITEMS: Count
    N_CALIBRATION: Count
    CONTEXT_TOKENS: Count
    QUESTION: Literal["hidden", "visible"]
    KEEP: Share
    CANDIDATES: Candidates
    N_SHUFFLES: Count
    N_BUDGET_SHUFFLES: Count
    PHASE_TASKS: SeveralOrNone[NonEmpty]
    N_BOOT: Count


class Throughput(ExperimentParameters):
    """Times and bytes of agents on one document, beside what else people would use."""

    experiment = "throughput"

    DTYPE: Dtype
    THREADS: CountOrZero
    CONTEXT_TOKENS: Several[Count]
    N_AGENTS: Several[Count]
    CODECS: Codecs
    ROUNDS: Count
    ONCE_ROUNDS: Count
    ANSWER_TOKENS: Count
    MAX_CACHE_GB: Positive
    GEOMETRY: OneGeometry
    GEOMETRY_TOKENS: Several[Count]
    GEOMETRY_AGENTS: Several[Count]
    GEOMETRY_DTYPES: Several[FloatDtype]


class Figures(Parameters):
    """Figures from stored results."""

    FORMATS: Several[Literal["pdf", "png"]]


NOTEBOOKS: dict[str, type[Parameters]] = {
    "00_start_here": Parameters,
    "01_memory_scaling": MemoryScaling,
    "02_ppl_inversion": PplInversion,
    "03_agent_fidelity": AgentFidelity,
    "04_longbench_recovery": PlanRecovery,
    "05_ablations": PlanAblations,
    "06_paper_vs_ours": Parameters,
    "07_figures": Figures,
    "08_inversion_controls": InversionControls,
    "09_throughput": Throughput,
    "09_codec_frontier": CodecFrontier,
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
        raise ParameterError(f"unknown notebook {notebook!r}{hint} Known: {', '.join(NOTEBOOKS)}")
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
            f"unknown parameter {name}{near(name, known)} {where} takes {', '.join(known)}"
        )


def _one_line(error: ValidationError, notebook: str) -> str:
    first = error.errors()[0]
    name, *place = first["loc"]
    if first["type"] == "missing":
        return f"{name} has no value; the parameters cell of notebooks/{notebook}.ipynb sets it"
    inside = "".join(f"[{index}]" for index in place)
    empty = first["type"] == "too_short"
    said = "it may not be empty" if empty else first["msg"].removeprefix("Value error, ")
    return f"{name}{inside}={first['input']!r}: {said[0].lower()}{said[1:]}"
