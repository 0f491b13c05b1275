"""How much a point computes, counted from its parameters: tokens read, decoding steps, sizes."""

from dataclasses import dataclass
from math import ceil

from polykv_lib.study.estimate.copies import Copies
from polykv_lib.study.params.schemas import (
    AgentFidelity,
    CodecFrontier,
    InversionControls,
    JointPlan,
    MemoryScaling,
    PlanAblations,
    PlanRecovery,
    PplInversion,
    Throughput,
)
from polykv_lib.study.params.types import ExperimentParameters
from polykv_lib.tasks import longbench, offline_suite, ruler

QUESTION_TOKENS = 60  # of an agent's question in its chat turn, or of an item's tail
METHODS = 4  # ways of decoding that memory_scaling times; one decodes agent after agent
READERS = 3  # of a document beside its pools: the full cache and two controls
AT_ONCE = 6  # changed documents that inversion_controls reads in one batch
ANSWER_TOKENS = 20  # of an item's tail where its question is part of the context
ASKED_TOKENS = 25  # of the question of agents whose steps are timed
WAYS = 7  # methods that throughput times beside its pools, four of them with dense copies
ASKINGS = 3  # times each method's agents read the question: to be timed, weighed, and at the peak
PEAK_STEPS = 5  # decoding steps to reach a method's peak
ERROR_POINTS = 4  # budgets at which a calibration pass evicts each layer alone


@dataclass(frozen=True, kw_only=True)
class Work:
    """`read` and `steps` decide the time, the others the memory."""

    read: int  # tokens that pass through the model in bulk
    read_a_layer: int = 0  # the same, once for each layer of the model
    steps: int  # decoding steps, of a batch of agents each
    document: int  # longest document, tokens
    agents: int  # largest batch
    own: int  # tokens of an agent's own, question and answer
    scored: int  # tokens whose logits are held at once
    batch: int = 0  # tokens that a batch of agents reads at once
    dtype: str = "auto"  # of the model
    threads: int = 0  # of a CPU; 0: as many as torch takes
    copies: Copies | None = None


def work_of(chosen: ExperimentParameters) -> Work | None:
    """The work of a point; None for an experiment that is not counted here."""
    match chosen:
        case MemoryScaling():
            return _memory(chosen)
        case PplInversion():
            return _perplexity(chosen)
        case InversionControls():
            return _inversion(chosen)
        case CodecFrontier():
            return _frontier(chosen)
        case AgentFidelity():
            return _agents(chosen)
        case PlanRecovery():
            methods = len(chosen.POLICIES) + 2 * len(chosen.PLANS) + 2 * len(chosen.CODECS)
            of_budget = 2 + len(chosen.ANSWERING)  # the best single policy, ours
            answered = 1 + len(chosen.KEEP) * of_budget  # and the full cache
            return _plans(chosen, len(chosen.KEEP), methods, answered * _answer_tokens(chosen))
        case PlanAblations():
            methods = chosen.N_SHUFFLES + chosen.N_BUDGET_SHUFFLES + 8 * len(chosen.CANDIDATES)
            # Ten plans decode 64 tokens of each phase task's items and of as many quotations.
            steps = 2 * 10 * 64 * chosen.N_ITEMS * len(chosen.PHASE_TASKS)
            free = _answer_tokens(chosen)  # each item is read once more, and nine plans answer
            reread = chosen.N_ITEMS * len(chosen.TASKS) * chosen.CONTEXT_TOKENS if free else 0
            return _plans(chosen, 1, methods, steps + 10 * free, reread)
        case JointPlan():
            return _joint(chosen)
        case Throughput():
            return _throughput(chosen)
    return None


def _memory(p: MemoryScaling) -> Work:
    rounds = METHODS * (p.ROUNDS + 5)
    return Work(
        read=sum(p.STEP_TOKENS),
        steps=len(p.STEP_TOKENS) * rounds * ceil(sum(1 + n / METHODS for n in p.STEP_AGENTS)),
        document=max(p.STEP_TOKENS),
        agents=max(p.STEP_AGENTS),
        own=QUESTION_TOKENS + 64,
        scored=max(p.STEP_AGENTS),
    )


def _perplexity(p: PplInversion) -> Work:
    read, scored = 0, [1]
    for prefix in {*p.PREFIX_TOKENS, p.FRONTIER_TOKENS} - {0}:
        codecs = len(p.CODECS) * (prefix in p.PREFIX_TOKENS)
        for protocol in p.PROTOCOLS:
            fixed = protocol == "fixed-window" or len(p.PROTOCOLS) == 1
            frontier = len(p.FRONTIER_CODECS) * (fixed and prefix == p.FRONTIER_TOKENS)
            window = p.SCORED_TOKENS if protocol == "fixed-window" else round(3 / 7 * prefix)
            read += p.N_DOCS * (prefix + window * (2 + codecs + frontier))
            scored.append(window)
    longest = max(*p.PREFIX_TOKENS, p.FRONTIER_TOKENS)
    return Work(read=read, steps=0, document=longest, agents=1, own=max(scored), scored=max(scored))


def _inversion(p: InversionControls) -> Work:
    lengths = {*p.PREFIX_TOKENS, p.CONTROL_TOKENS}
    seeded = 1 + p.N_SEEDS  # the full cache, then the codec with each seed; half of the controls
    readings = seeded * len(lengths) + ceil(seeded / 2) * len(p.CONTROLS)
    return Work(
        read=p.N_PASSAGES * (sum(lengths) + readings * p.SCORED_TOKENS),
        steps=0,
        document=max(lengths),
        agents=2 * AT_ONCE,  # changed documents, and their copies in the cache
        own=max(lengths) + p.SCORED_TOKENS,
        scored=AT_ONCE * p.SCORED_TOKENS,
    )


def _frontier(p: CodecFrontier) -> Work:
    options = len(p.KEY_OPTIONS) + len(p.VALUE_OPTIONS)
    n_selection = p.N_PASSAGES // 2
    tails = p.N_PASSAGES * (1 + len(p.CODECS)) + (p.N_PASSAGES - n_selection) * len(p.BUDGETS)
    return Work(
        read=p.N_PASSAGES * p.PREFIX_TOKENS + tails * p.SCORED_TOKENS,
        read_a_layer=n_selection * options * p.SCORED_TOKENS // 2,
        steps=0,
        document=p.PREFIX_TOKENS,
        agents=1,
        own=p.SCORED_TOKENS,
        scored=p.SCORED_TOKENS,
    )


def _agents(p: AgentFidelity) -> Work:
    n_readers, answers = READERS + len(p.CODECS), max(p.N_AGENTS) + min(p.N_AGENTS)
    own = QUESTION_TOKENS + p.MAX_NEW_TOKENS
    documents = p.N_DOCS * len(p.CONTEXT_TOKENS)
    return Work(
        read=2 * p.N_DOCS * sum(p.CONTEXT_TOKENS) + documents * n_readers * answers * own,
        steps=documents * n_readers * 2 * p.MAX_NEW_TOKENS,
        document=max(p.CONTEXT_TOKENS),
        agents=max(p.N_AGENTS),
        own=own,
        scored=max(p.N_AGENTS),
    )


def _joint(p: JointPlan) -> Work:
    n_families, n_shares = len(p.TASKS), len(p.SHARES)
    n_test, n_calibration = p.N_ITEMS * n_families, p.N_CALIBRATION * n_families
    methods = 6 + len(p.FIXED)  # a codec alone, singles, paper B's, ours in bf16 and codecs, joint
    tried = len(p.POLICIES) + len(p.FIXED)
    evicted_alone = n_calibration * (1 + len(p.CANDIDATES)) * ERROR_POINTS
    stored_alone = n_families * len(p.MENU)
    tail = QUESTION_TOKENS if p.QUESTION == "hidden" else ANSWER_TOKENS
    tails = n_shares * (n_test * methods + n_calibration * tried)
    return Work(
        read=(n_test + 3 * n_calibration) * p.CONTEXT_TOKENS + tails * tail,
        read_a_layer=(evicted_alone + stored_alone) * tail // 2,
        steps=0,
        document=p.CONTEXT_TOKENS,
        agents=1,
        own=tail,
        scored=tail,
    )


def _answer_tokens(p: PlanRecovery | PlanAblations) -> int:
    """Tokens of one free answer to every test item, each as long as its task allows."""
    own = {
        "longbench": {name: task.max_new_tokens for name, task in longbench.tasks().items()},
        "ruler": ruler.MAX_NEW_TOKENS,
    }.get(p.SUITE, {})
    most = p.MAX_NEW_TOKENS
    return p.N_ITEMS * sum(min(most, own.get(task, most)) for task in p.TASKS)


def _plans(
    p: PlanRecovery | PlanAblations, n_keep: int, methods: int, steps: int, reread: int = 0
) -> Work:
    known = offline_suite.TASKS if p.SUITE == "longbench" else p.TASKS  # to calibrate on
    n_test, n_calibration = p.N_ITEMS * len(p.TASKS), p.N_CALIBRATION * len(known)
    evicted_alone = n_calibration * n_keep * (1 + len(p.CANDIDATES)) * ERROR_POINTS
    return Work(
        read=(n_test + n_calibration) * p.CONTEXT_TOKENS
        + reread
        + n_test * n_keep * methods * QUESTION_TOKENS,
        read_a_layer=evicted_alone * QUESTION_TOKENS // 2,  # through half of the layers, on average
        steps=steps,
        document=p.CONTEXT_TOKENS,
        agents=1,
        own=QUESTION_TOKENS,
        scored=QUESTION_TOKENS,
    )


def _throughput(p: Throughput) -> Work:
    n_documents, n_sizes, n_pools = len(p.CONTEXT_TOKENS), len(p.N_AGENTS), len(p.CODECS) + 1
    methods, rounds = n_pools + WAYS, 1 + p.ROUNDS + PEAK_STEPS
    # Plain, two that evict (one of them takes half as long again), one with the question.
    prefills = 3 + 4.5 * (1 + p.ONCE_ROUNDS)
    asked = ASKINGS * methods * sum(p.N_AGENTS) * ASKED_TOKENS
    steps = (methods - 1) * n_sizes * rounds + (methods + n_pools) * p.ANSWER_TOKENS
    return Work(
        read=ceil(prefills * sum(p.CONTEXT_TOKENS)) + n_documents * asked,
        steps=n_documents * steps,
        document=max(p.CONTEXT_TOKENS),
        agents=max(p.N_AGENTS),
        own=ASKED_TOKENS + max(p.ANSWER_TOKENS, 1 + p.ROUNDS),
        scored=max(p.N_AGENTS),
        batch=max(p.N_AGENTS) * ASKED_TOKENS,
        dtype=p.DTYPE,
        threads=p.THREADS,
        copies=Copies(
            sizes=tuple((n, tokens) for tokens in p.CONTEXT_TOKENS for n in p.N_AGENTS),
            limit=1e9 * p.MAX_CACHE_GB,
            rounds=rounds,
            methods=methods,
            n_pools=n_pools - 1,
            shape=p.GEOMETRY,
            shape_tokens=tuple(p.GEOMETRY_TOKENS),
            shape_settings=len(p.GEOMETRY_DTYPES) * len(p.GEOMETRY_AGENTS),
            shape_rounds=1 + p.ROUNDS,
            shape_dtypes=tuple(p.GEOMETRY_DTYPES),
        ),
    )
