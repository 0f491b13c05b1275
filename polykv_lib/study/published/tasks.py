"""What each published benchmark score is a score of, in the words of our own experiments.

A score that no point of the grids could produce has the reason in its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from polykv_lib.tasks import longbench, ruler

FULL, BEST_SINGLE = "FullKV", "best single"
PAPER_B, PPL_BUDGETS = "paper-b", "paper-b, ppl budgets"
RECOVERY, ABLATIONS = "plan_recovery", "plan_ablations"
MAIN_BUDGET: Final = 512  # tokens a layer and head, on average

_LONGBENCH: Final = tuple(longbench.tasks())
_NO_PHASE = "ours evicts at prefill, the published plan's phase is not printed"
_CHOSEN_ON_TEST = (
    "the published plan is the best of an unstated number, chosen on the benchmark itself; ours is "
    "the better of the paper's two ways to make one, from calibration items"
)
_CATEGORIES: Final = {  # column of Table 4 -> category of our tasks
    "single_doc_qa": "single-document QA",
    "multi_doc_qa": "multi-document QA",
    "summarization": "summarisation",
    "few_shot": "few-shot",
    "synthetic": "synthetic",
    "code": "code",
}
_RULER_CATEGORIES: Final[dict[str, tuple[str, ...]]] = {
    "niah": tuple(ruler.NEEDLE_TASKS),
    "ruler_qa": ("qa_1", "qa_2"),
    "word_extraction": ("cwe", "fwe"),
    "variable_tracking": ("vt",),
}
_TASK_COLUMNS: Final = {
    "NrtvQA": "narrativeqa",
    "Qasper": "qasper",
    "MF-en": "multifieldqa_en",
    "HotpotQA": "hotpotqa",
    "2WikiMQA": "2wikimqa",
    "Musique": "musique",
    "GovReport": "gov_report",
    "QMSum": "qmsum",
    "MultiNews": "multi_news",
    "TREC": "trec",
    "TriviaQA": "triviaqa",
    "SAMSum": "samsum",
    "PCount": "passage_count",
    "PRe": "passage_retrieval_en",
    "Lcc": "lcc",
    "RB-P": "repobench-p",
}
_OWN_METHODS: Final = ("SnapKV", "PyramidKV", "StreamingLLM")


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Answers to benchmark tasks: mean over the tasks of each task's mean score, times 100.

    `methods` are names of the experiment's own; of several the one of the highest score counts.
    """

    suite: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    budget: int | None = None  # mean tokens a layer and head; None: nothing is evicted
    minus: str = ""  # the method whose score is subtracted
    experiment: str = RECOVERY
    routed: bool = False  # by a signal, among the candidates of the point
    single: str = ""  # what the best single policy has to be
    caveat: str = ""  # why the two are not comparable, however near


def scored_of(file: str, run: Mapping[str, Any], metric: str) -> Scored | str:
    """What a column of one line of a published file is a score of, or why it is none of ours."""
    match file:
        case "evict_main":
            suite = "ruler" if run["benchmark"].startswith("RULER") else "longbench"
            return _plans(suite, run["avg_budget"], metric)
        case "evict_sweep":
            return _plans("longbench", run["avg_budget"], metric)
        case "evict_signals":
            return _signals(run, metric)
        case "evict_categories":
            return _category(metric)
        case "baselines_longbench16_llama31":
            return _task(run, metric)
    return "no notebook reads LongBench-E, which is scored here"


def _plans(suite: str, budget: int, metric: str) -> Scored | str:
    tasks = _LONGBENCH if suite == "longbench" else ruler.TASKS
    of: dict[str, tuple[tuple[str, ...], str]] = {
        "full_kv": ((FULL,), ""),
        "best_baseline": ((BEST_SINGLE,), ""),
        "polykv_uniform": ((PAPER_B,), _NO_PHASE),
        "polykv_ppl_alloc": ((PPL_BUDGETS,), _NO_PHASE),
        "polykv_top1": ((PAPER_B, PPL_BUDGETS), _CHOSEN_ON_TEST),
    }
    if metric not in of:
        return "the lowest of five plans that are not named has no parameters"
    methods, caveat = of[metric]
    own = None if methods == (FULL,) else int(budget)
    return Scored(suite=suite, tasks=tasks, methods=methods, budget=own, caveat=caveat)


def _signals(run: Mapping[str, Any], metric: str) -> Scored | str:
    if run["phase"] != "prefill":
        return "routes that evict while decoding are scored by KL alone here (table of phases)"
    group = {"eviction": "policies", "budget": "budgets"}[run["decision"]]
    direction = "inverse" if metric.endswith("inverse") else "forward"
    return Scored(
        suite="longbench",
        tasks=_LONGBENCH,
        methods=(f"{group} by {run['signal']}, {direction} at prefill",),
        budget=MAIN_BUDGET,
        experiment=ABLATIONS,
        routed=group == "policies",
        single="SnapKV" if group == "budgets" else "",
    )


def _category(metric: str) -> Scored:
    in_ruler = metric in _RULER_CATEGORIES
    named = longbench.tasks().items()
    tasks = (
        _RULER_CATEGORIES[metric]
        if in_ruler
        else tuple(name for name, task in named if task.category == _CATEGORIES[metric])
    )
    return Scored(
        suite="ruler" if in_ruler else "longbench",
        tasks=tasks,
        methods=(PAPER_B, PPL_BUDGETS),
        minus=BEST_SINGLE,
        budget=MAIN_BUDGET,
        caveat=_CHOSEN_ON_TEST,
    )


def _task(run: Mapping[str, Any], metric: str) -> Scored | str:
    method = run["method"]
    if method not in (FULL, *_OWN_METHODS):
        return f"{method} is no policy of this library"
    return Scored(
        suite="longbench",
        tasks=(_TASK_COLUMNS[metric],),
        methods=(method,),
        budget=None if method == FULL else int(run["budget"]),
    )
