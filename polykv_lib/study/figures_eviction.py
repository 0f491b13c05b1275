"""Figures of the eviction experiments: what plans win back, and what they look like."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from polykv_lib.study.drawing import counted, legend_below, look
from polykv_lib.study.rows import pick

FLOOR = -100.0  # per cent; what falls below is cut, and counted in the title
SETTING = ("model", "suite", "question", "keep")


def recovery_by_family(numbers: pd.DataFrame, ax: Axes) -> None:
    """Share of the best single policy's KL that each plan wins back, with its interval."""
    gaps = pick(numbers, table="recovery", metric="gap_recovered_pct", role="plan")
    gaps = _one_setting(gaps)
    gaps = pick(gaps, codec=gaps["codec"].iloc[0])
    families, methods = list(gaps["family"].unique()), list(gaps["method"].unique())
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


def _one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first setting; others are in the tables."""
    return pick(rows, **{name: rows[name].iloc[0] for name in SETTING})


def _title(rows: pd.DataFrame) -> str:
    model, suite, question, keep = (rows[name].iloc[0] for name in SETTING)
    return f"{model}, {suite}, {keep:.0%} kept, question {question}"
