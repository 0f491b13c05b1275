"""The parameters of each notebook: which there are, and what each may be."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polykv_lib.study.params.types import (
    Answering,
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
    Several,
    SeveralOrNone,
    Share,
    Text,
    ValueOptions,
)


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
    CODECS: Codecs
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
    added: ClassVar = {"ANSWERING": []}

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
    ANSWERING: Answering
    N_BOOT: Count


class PlanAblations(ExperimentParameters):
    """What makes a plan good: signals, budgets, placement, content, heads."""

    experiment = "plan_ablations"
    added: ClassVar = {"LONGBENCH_DIR": "", "MAX_NEW_TOKENS": 0}

    SUITE: Literal["offline", "ruler", "longbench"]
    LONGBENCH_DIR: Text
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
    MAX_NEW_TOKENS: CountOrZero
    N_BOOT: Count


class JointPlan(ExperimentParameters):
    """One plan of policies, tokens and codecs beside either paper's way, at equal bytes."""

    experiment = "joint_plan"

    SUITE: Literal["offline", "ruler"]
    TASKS: Several[NonEmpty]
    N_ITEMS: Count
    N_CALIBRATION: Count
    CONTEXT_TOKENS: Count
    QUESTION: Literal["hidden", "visible"]
    SHARES: Several[Share]
    POLICIES: Candidates
    CANDIDATES: Candidates
    LEVEL: Literal["layer", "head"]
    FAMILY: Codecs
    FIXED: Codecs
    MENU: Codecs
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
    "06_inversion_controls": InversionControls,
    "07_codec_frontier": CodecFrontier,
    "08_joint_plan": JointPlan,
    "09_throughput": Throughput,
    "10_paper_vs_ours": Parameters,
    "11_figures": Figures,
}
