"""Every published number beside ours, with a status and the reason for it.

A published number is never copied into our column, and a missing one says why it is missing.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from polykv_lib.study.published import (
    POOL,
    SHAPES,
    Published,
    cached_tokens,
    copy_gb,
    pool_formats,
    pool_gb,
    published_rows,
)
from polykv_lib.study.record import Record
from polykv_lib.study.rows import family, pick, tidy
from polykv_lib.study.tables.comparison_tasks import answered_runs, task_answer
from polykv_lib.study.tables.status import (
    DIFFERS,
    NOT_COMPARABLE,
    NOT_RUN,
    REPRODUCED,
    Ours,
    of_interval,
)

TOLERANCE = {"GB": 0.0015, "%": 0.1}  # without an interval; otherwise the interval decides
UNPUBLISHED_TEXTS = {"ARPANET", "Wikipedia articles"}
COLUMNS = (
    *("paper table", "row", "metric", "unit", "paper", "ours", "delta", "delta %", "n"),
    *("95 % lo", "95 % hi", "model (paper)", "model (ours)", "kind", "status", "why"),
)


def paper_vs_ours(records: Sequence[Record], papers_root: Path) -> pd.DataFrame:
    """Every published number beside ours: reproduced, differs, not comparable or not run here.

    Args:
        records: stored points of any experiments; other experiments' rows are ignored.
        papers_root: the folder of published CSV files.

    Returns:
        One line a published number, in the order of the CSV files.
    """
    ours, answered = tidy(records), answered_runs(records)
    return _frame(
        [
            (row, _answer(row, ours) if row.paper == POOL else task_answer(row, answered))
            for row in published_rows(papers_root)
        ]
    )


def same_protocol(records: Sequence[Record], papers_root: Path) -> pd.DataFrame:
    """Our models under the paper's own 70/30 perplexity protocol: beside it, not comparable to it.

    Returns:
        One line a published text, perplexity metric and model of ours; columns as `paper_vs_ours`.
    """
    ours = tidy(records)
    seen: dict[tuple[str, ...], Published] = {}
    for row in published_rows(papers_root):
        if row.paper == POOL and row.metric.startswith("ppl_"):
            seen.setdefault((row.model, row.text, str(row.label_tokens), row.metric), row)
    pairs = []
    for row in seen.values():
        runs = _perplexities(row, ours)
        others = runs[runs["model"].map(family) != family(row.model)]
        for model, found in others.groupby("model"):
            nearest = _nearest(found, row)
            why = (
                f"another model and other texts: {model}, {nearest['prefix_tokens']:,.0f} tokens in"
                f" the pool; published with {cached_tokens(row.label_tokens):,}"
            )
            pairs.append((row, _measured(nearest, NOT_COMPARABLE, why)))
    return _frame(pairs)


def _answer(row: Published, ours: pd.DataFrame) -> Ours:
    if row.metric in _MEMORY:
        return _MEMORY[row.metric](row, ours)
    return _quality(row, ours)


def _without(row: Published, ours: pd.DataFrame) -> Ours:
    shape, cached = SHAPES[row.model], cached_tokens(row.label_tokens)
    value, printed = (row.n_agents * copy_gb(shape, cached, d) for d in ("bfloat16", "float32"))
    why = (
        f"bfloat16 here; the printed number counts float32 bytes ({printed:.3f} GB); the cache"
        f" holds 70 % of {row.label_tokens:,} tokens, {cached:,}"
    )
    return _computed(row, value, "computed", why)


def _with(row: Published, ours: pd.DataFrame) -> Ours:
    copy = copy_gb(SHAPES[row.model], cached_tokens(row.label_tokens), "float32")
    value, kind = _pool(row, ours)
    why = (
        "packed codes, norms and scales; the printed number is one float32 copy over 32/11"
        f" ({copy * 11 / 32:.3f} GB), norms not counted"
    )
    return _computed(row, value, kind, why)


def _reduction(row: Published, ours: pd.DataFrame) -> Ours:
    copy = copy_gb(SHAPES[row.model], cached_tokens(row.label_tokens), "bfloat16")
    value, kind = _pool(row, ours)
    sharing = 100 * (1 - 1 / row.n_agents)
    why = f"one pool with its norms against {row.n_agents} bfloat16 copies; sharing alone gives"
    total = 100 * (1 - value / (row.n_agents * copy))
    return _computed(row, total, kind, f"{why} {sharing:.1f} %")


_MEMORY: dict[str, Callable[[Published, pd.DataFrame], Ours]] = {
    "without_gb": _without,
    "with_gb": _with,
    "reduction_pct": _reduction,
}


def _pool(row: Published, ours: pd.DataFrame) -> tuple[float, str]:
    """GB of the paper's pool at this size: really built where a record holds it, else computed."""
    cached, shape = cached_tokens(row.label_tokens), SHAPES[row.model]
    built = pick(
        ours,
        table="pool_memory",
        metric="pool_bytes",
        kind="measured",
        codec="paper",
        geometry=family(row.model),
        context_tokens=cached,
    )
    if len(built):
        return float(built["value"].iloc[0]) / 1e9, "measured"
    return pool_gb(shape, cached, pool_formats(shape.head_dim)["packed, fp16 norms"]), "computed"


def _computed(row: Published, value: float, kind: str, why: str) -> Ours:
    near = abs(value - row.value) <= TOLERANCE[row.unit]
    status = REPRODUCED if near else DIFFERS
    return Ours(status=status, why=why, value=value, model=f"{family(row.model)} shape", kind=kind)


def _quality(row: Published, ours: pd.DataFrame) -> Ours:
    runs = _perplexities(row, ours) if row.metric.startswith("ppl_") else _answers(row, ours)
    same = runs[runs["model"].map(family) == family(row.model)]
    if same.empty:
        unpublished = "; its text is not published" if row.text in UNPUBLISHED_TEXTS else ""
        return Ours(status=NOT_RUN, why=f"{row.model} needs a GPU{unpublished}")
    found = _nearest(same, row)
    if "agent" in row.metric:
        why = "the published value is one agent's, ours the mean over agents"
        return _measured(found, NOT_COMPARABLE, why)
    if found["text"] != row.text:
        return _measured(found, NOT_COMPARABLE, f"same model, another text than {row.text}")
    return _measured(found, *of_interval(_inside(found, row.value)))


def _perplexities(row: Published, ours: pd.DataFrame) -> pd.DataFrame:
    return pick(ours, table="ppl", metric=row.metric, protocol="paper-70-30", codec="paper")


def _answers(row: Published, ours: pd.DataFrame) -> pd.DataFrame:
    """Answers of the same number of agents; BERTScore only by the paper's encoder, not rescaled."""
    name = "bertscore_f1" if row.metric == "bertscore_f1_mean" else "token_overlap"
    found = pick(
        ours, table="fidelity", metric=name, control="pool", codec="paper", n_agents=row.n_agents
    )
    if name == "bertscore_f1":
        return pick(found, encoder="roberta-large", rescaled=False)
    return found


def _nearest(runs: pd.DataFrame, row: Published) -> dict[str, Any]:
    """The run on the published text if there is one, of those the one nearest in cached tokens."""
    on_text = pick(runs, text=row.text)
    runs = on_text if len(on_text) else runs
    held = runs.reindex(columns=["prefix_tokens", "context_tokens"]).bfill(axis=1).iloc[:, 0]
    distance = (pd.to_numeric(held) - cached_tokens(row.label_tokens)).abs()
    nearest = runs.iloc[int(distance.fillna(0).argmin())]
    return {str(name): value for name, value in nearest.items()}


def _inside(found: dict[str, Any], printed: float) -> bool:
    """Whether the printed value lies in our interval; without one, within 1 % of our value."""
    if pd.isna(found["lo"]):
        return abs(found["value"] - printed) <= 0.01 * abs(printed)
    return bool(found["lo"] <= printed <= found["hi"])


def _measured(found: dict[str, Any], status: str, why: str) -> Ours:
    numbers = {name: found[name] for name in ("value", "lo", "hi") if not pd.isna(found[name])}
    n = None if pd.isna(found["n"]) else int(found["n"])
    return Ours(status=status, why=why, n=n, model=found["model"], kind=found["kind"], **numbers)


def _frame(pairs: Sequence[tuple[Published, Ours]]) -> pd.DataFrame:
    return pd.DataFrame([_line(row, ours) for row, ours in pairs], columns=pd.Index(COLUMNS))


def _line(row: Published, ours: Ours) -> dict[str, Any]:
    value = ours.value if ours.status in (REPRODUCED, DIFFERS) else None
    delta = None if value is None else value - row.value
    relative = 100 * delta / abs(row.value) if delta is not None and row.value else None
    left = (f"{row.paper}, {row.table}", row.row, row.metric, row.unit, row.value)
    right = (ours.value, delta, relative, ours.n, ours.lo, ours.hi, row.model, ours.model)
    return dict(zip(COLUMNS, (*left, *right, ours.kind, ours.status, ours.why), strict=True))
