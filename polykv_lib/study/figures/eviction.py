"""Figures of the eviction experiments: what plans win back, and what they look like."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from polykv_lib.study.figures.drawing import counted, legend_below, log_values, look
from polykv_lib.study.rows import pick

FLOOR = -100.0  # per cent; what falls below is cut, and counted in the title
SETTING = ("model", "suite", "question", "keep")
KEEP = 0.25  # shown where it was run
PLANS = ("paper-b", "paper-b, ppl budgets", "ours")


def recovery_by_family(numbers: pd.DataFrame, ax: Axes) -> None:
    """Share of the best single policy's KL that each plan wins back, with its interval."""
    gaps = pick(numbers, table="recovery", metric="gap_recovered_pct")
    gaps = gaps[gaps["method"].isin(PLANS)]
    gaps = _one_setting(gaps)
    gaps = pick(gaps, codec=gaps["codec"].iloc[0])
    families, methods = list(gaps["family"].unique()), PLANS
    width, n_below = 0.8 / len(methods), 0
    for i, method in enumerate(methods):
        rows = pick(gaps, method=method).set_index("family").reindex(families)
        x = np.arange(len(families)) + (i - (len(methods) - 1) / 2) * width
        bars = np.vstack([rows["value"] - rows["lo"], rows["hi"] - rows["value"]])
        drawn = look(method)
        ax.bar(x, rows["value"], width, color=drawn.colour, label=drawn.label)
        if np.isfinite(bars).any():
            ax.errorbar(
                x,
                rows["value"],
                yerr=np.nan_to_num(bars).clip(min=0),
                fmt="none",
                ecolor="black",
                elinewidth=0.6,
                capsize=1.2,
            )
        n_below += int((rows["value"] < FLOOR).sum())
    ax.axhline(0, color="black", lw=0.6)
    ax.set_xticks(range(len(families)), [f.replace("_", "\n") for f in families], fontsize=6)
    ax.set_ylim(max(FLOOR, ax.get_ylim()[0]), 105)
    ax.set_ylabel("gap to the full cache recovered [%]")
    cut = f", bars cut at {FLOOR:.0f} %: {n_below}" if n_below else ""
    ax.set_title(f"{_title(gaps)}, {counted(gaps, 'items')}{cut}")
    legend_below(ax)


def plan_map(numbers: pd.DataFrame, ax: Axes) -> None:
    """Each layer as a bar: its policy as colour, its tokens a head as height, plan above plan."""
    plans = _one_setting(pick(numbers, table="plan", metric="budget"))
    tokens = plans["context_tokens"].iloc[0]
    methods = list(plans["method"].unique())
    for i, method in enumerate(methods):
        rows = pick(plans, method=method)
        base = len(methods) - 1 - i
        height = 0.9 * rows["value"] / tokens
        colours = [look(policy).colour for policy in rows["policy"]]
        ax.bar(rows["layer"], height, 0.9, bottom=base, color=colours)
        ax.axhline(base, color="black", lw=0.6)
    for policy in plans["policy"].unique():
        ax.bar(0, 0, color=look(policy).colour, label=look(policy).label)
    ax.set_yticks([len(methods) - 1 - i + 0.45 for i in range(len(methods))], methods)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="layer", ylim=(0, len(methods)))
    ax.set_title(f"{_title(plans)}; a full row is {tokens:,.0f} tokens")
    legend_below(ax)


def budget_sweep(numbers: pd.DataFrame, ax: Axes) -> None:
    """KL from the full cache over the share that is kept, with its interval as a band."""
    rows = _sweep(numbers, "kl_nats", ax)
    log_values(ax)
    ax.set_ylabel("KL from the full cache [nats]")
    ax.set_title(_swept(rows))


def budget_sweep_gap(numbers: pd.DataFrame, ax: Axes) -> None:
    """How much of the best single policy's KL is won back, over the share that is kept."""
    rows = _sweep(numbers, "gap_recovered_pct", ax)
    ax.set(ylabel="gap to the full cache recovered [%]", ylim=(max(FLOOR, ax.get_ylim()[0]), 105))
    ax.set_title(_swept(rows))


def _sweep(numbers: pd.DataFrame, metric: str, ax: Axes) -> pd.DataFrame:
    """The lines of the point with most budgets, whose rows are returned."""
    rows = pick(numbers, table="recovery", family="macro", metric=metric)
    rows = pick(rows, codec=rows["codec"].iloc[0])
    budgets = rows.groupby("key", sort=False)["keep"].nunique()
    rows = pick(rows, key=budgets.idxmax())
    named = rows["method"].where(rows["role"] != "best single", "best single")
    for method in ("best single", *PLANS):
        own = rows[named == method].sort_values("keep")
        drawn = look(method)
        ax.plot(own["keep"], own["value"], c=drawn.colour, marker=drawn.marker, ls=drawn.line,
                label=drawn.label)  # fmt: skip
        ax.fill_between(own["keep"], own["lo"], own["hi"], color=drawn.colour, alpha=0.15, lw=0)
    ax.set(xscale="log", xlabel="share of the context's tokens that is kept")
    ax.set_xticks(sorted(rows["keep"].unique()))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.3g}%"))
    ax.xaxis.set_minor_locator(NullLocator())
    legend_below(ax)
    return rows


def _swept(rows: pd.DataFrame) -> str:
    model, suite, question, _ = (rows[name].iloc[0] for name in SETTING)
    return f"{model}, {suite}, question {question},\n{counted(rows, 'items')}"


def _one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one setting: a quarter kept, or the first there is; tables have the others."""
    if (rows["keep"] == KEEP).any():
        rows = pick(rows, keep=KEEP)
    return pick(rows, **{name: rows[name].iloc[0] for name in SETTING})


def _title(rows: pd.DataFrame) -> str:
    model, suite, question, keep = (rows[name].iloc[0] for name in SETTING)
    return f"{model}, {suite}, {keep:.0%} kept, question {question}"
