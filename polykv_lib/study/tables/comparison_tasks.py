"""Published benchmark scores beside the free answers that are stored of the same model and budget.

Scores are taken from the answers themselves, so that a benchmark whose tasks are spread over
several points has one mean with one interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from polykv_lib.metrics.intervals import N_RESAMPLES, Interval, stratified
from polykv_lib.study.published import Published
from polykv_lib.study.published.tasks import ABLATIONS, BEST_SINGLE, FULL, RECOVERY, Scored
from polykv_lib.study.record import Record
from polykv_lib.study.rows import family
from polykv_lib.study.tables.status import NOT_COMPARABLE, NOT_RUN, Ours, of_interval

SUITES: Final = {"longbench": "LongBench", "ruler": "RULER"}
Scores = dict[str, dict[str, dict[str, float]]]  # task -> method -> item -> score


@dataclass(frozen=True, kw_only=True)
class Answered:
    """All tasks of a suite that were answered in one setting; points differ in their tasks."""

    experiment: str
    model: str
    suite: str
    question: str
    context_tokens: int
    keep: float
    candidates: tuple[str, ...]  # what plans choose from
    single: dict[str, str] = field(default_factory=dict)  # by task, the best single policy
    scores: Scores = field(default_factory=dict)

    @property
    def budget(self) -> int:
        """Mean tokens a layer and head of a context of `context_tokens`."""
        return round(self.keep * self.context_tokens)

    def methods(self, task: str, name: str) -> dict[str, float]:
        """Score by item of a method; the best single policy is that of the task's point."""
        own = self.scores.get(task, {})
        return own.get(self.single[task] if name == BEST_SINGLE else name, {}) if own else {}

    def columns(self, tasks: Sequence[str], names: Sequence[str]) -> list[np.ndarray] | None:
        """One array a task, one line an item, one column a method; None if something lacks."""
        found = []
        for task in tasks:
            each = [self.methods(task, name) for name in names]
            if not each[0] or any(own.keys() != each[0].keys() for own in each):
                return None
            found.append(np.array([[100 * own[item] for own in each] for item in each[0]]))
        return found


def answered_runs(records: Sequence[Record]) -> list[Answered]:
    """Free answers by setting, from the samples of the experiments on plans."""
    found: dict[tuple[Any, ...], Answered] = {}
    for record in records:
        if record.experiment not in (RECOVERY, ABLATIONS):
            continue
        p: dict[str, Any] = dict(record.params)
        chosen: Any = record.provenance.get("best_single", "")
        for sample in record.samples:
            named: dict[str, Any] = dict(sample)
            if named.get("score") is None:
                continue
            keep = named.get("keep", p["KEEP"])
            setting = {
                "experiment": record.experiment,
                "model": p["MODEL"],
                "suite": p["SUITE"],
                "question": p["QUESTION"],
                "context_tokens": p["CONTEXT_TOKENS"],
                "keep": keep,
                "candidates": tuple(p["CANDIDATES"]),
            }
            sampled = (record.provenance.get("profile"), p["SEED"], p["N_ITEMS"])
            run = found.setdefault((*setting.values(), *sampled), Answered(**setting))
            task = named["family"]
            run.single[task] = chosen[str(keep)] if isinstance(chosen, dict) else chosen
            method = named.get("method") or named["plan"]
            of_task = run.scores.setdefault(task, {})
            of_task.setdefault(method, {})[named["item"]] = named["score"]
    return list(found.values())


def task_answer(row: Published, runs: Sequence[Answered]) -> Ours:
    """Our side of a published benchmark score."""
    wanted = row.scored
    if isinstance(wanted, str):
        return Ours(status=NOT_RUN, why=wanted)
    suite = f"{row.model} on {SUITES[wanted.suite]}"
    same = [
        run
        for run in runs
        if (run.experiment, run.suite) == (wanted.experiment, wanted.suite)
        and family(run.model) == family(row.model)
    ]
    if not same:
        return Ours(status=NOT_RUN, why=f"{suite} is a point of the grid t4-8b, for two T4s")
    budget = wanted.budget
    same = [run for run in same if budget is None or run.budget == budget]
    if not same:
        return Ours(status=NOT_RUN, why=f"{suite} is stored with other budgets than {budget}")
    measured = [(run, value) for run in same if (value := _value(run, wanted)) is not None]
    if not measured:
        missing = min(_missing(run, wanted) for run in same)
        many = f"{missing} of {len(wanted.tasks)} tasks" if len(wanted.tasks) > 1 else "its task"
        return Ours(status=NOT_RUN, why=f"{suite} lacks answers by {_named(wanted)} to {many}")
    run, value = max(measured, key=lambda found: _rank(wanted, *found))
    status, why = _status(row, wanted, run, value)
    return Ours(
        status=status,
        why=why,
        value=value.value,
        n=value.n,
        lo=value.lo,
        hi=value.hi,
        model=run.model,
        kind="measured",
    )


def _value(run: Answered, wanted: Scored) -> Interval | None:
    """Mean over tasks, or mean difference, with items resampled in pairs inside their tasks."""
    names = [*wanted.methods, *([wanted.minus] if wanted.minus else [])]
    columns = run.columns(wanted.tasks, names)
    if columns is None:
        return None
    means = np.mean([column.mean(0) for column in columns], axis=0)
    best = int(means[: len(wanted.methods)].argmax())

    def statistic(m: np.ndarray) -> Any:
        return m[..., best] - (m[..., -1] if wanted.minus else 0)

    return stratified(columns, statistic, seed=0, n_resamples=N_RESAMPLES)


def _rank(wanted: Scored, run: Answered, value: Interval) -> tuple[Any, ...]:
    """The run nearest to what was published, and of those the one of most items."""
    singles = {run.single[task] for task in wanted.tasks}
    of_single = bool(wanted.single) and singles == {wanted.single}
    return of_single, run.question == "visible", len(run.candidates), value.n


def _missing(run: Answered, wanted: Scored) -> int:
    return sum(run.columns([task], wanted.methods) is None for task in wanted.tasks)


def _named(wanted: Scored) -> str:
    return " or ".join(wanted.methods)


def _status(row: Published, wanted: Scored, run: Answered, value: Interval) -> tuple[str, str]:
    protocol = f"contexts of at most {run.context_tokens:,} tokens, published: not printed"
    singles = ", ".join(sorted({run.single[task] for task in wanted.tasks}))
    uses_single = BEST_SINGLE in (*wanted.methods, wanted.minus)
    if uses_single:
        protocol += f"; the best single policy, by calibration items, is {singles}"
    if wanted.routed:
        protocol += f"; routed among {', '.join(run.candidates)}"
    if wanted.routed and len(run.candidates) < 2:
        return NOT_COMPARABLE, f"a single candidate leaves nothing to route; {protocol}"
    if wanted.caveat:
        return NOT_COMPARABLE, f"{wanted.caveat}; {protocol}"
    if wanted.single and singles != wanted.single:
        why = f"the published budgets are for {wanted.single}, ours for {singles}"
        return NOT_COMPARABLE, f"{why}; {protocol}"
    if run.question == "hidden" and wanted.methods != (FULL,):
        return NOT_COMPARABLE, f"the question was hidden from the policies; {protocol}"
    if value.lo is None or value.hi is None:
        return NOT_COMPARABLE, f"one item a task leaves no interval; {protocol}"
    status, why = of_interval(value.lo <= row.value <= value.hi)
    return status, f"{why}; {protocol}"
