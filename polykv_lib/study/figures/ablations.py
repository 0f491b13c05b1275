"""Figures of the ablations: what each signal chooses, forward and inverse, beside one policy."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from polykv_lib.study.figures.drawing import counted, legend_below, log_values, look
from polykv_lib.study.rows import pick

OFFSETS = {"uniform": 0.0, "forward": 0.15, "inverse": -0.15, "shuffled": 0.0}  # of a line's marks


def signals_by_decision(numbers: pd.DataFrame, ax: Axes) -> None:
    """KL under the policies or the budgets that each signal chooses at prefill."""
    _signals(pick(numbers, table="ablations", metric="kl_nats"), ax)
    log_values(ax, "x")


def signals_by_phase(numbers: pd.DataFrame, ax: Axes) -> None:
    """KL under the policies that each signal chooses, at prefill, while generating, or both."""
    rows = pick(numbers, table="phases", metric="kl_nats")
    _signals(rows.assign(varied=rows["phase"] + ": " + rows["varied"]), ax)


def _signals(rows: pd.DataFrame, ax: Axes) -> None:
    """One line a decision and signal, one mark a direction; of several shuffles the most."""
    names = (rows["varied"] + ", " + rows["signal"]).str.replace("single", "one policy")
    names = names.str.replace("gain_curve", "gain x curve")
    shuffles = rows["direction"].str.extract(r"^(\d+) shuffles", expand=False).astype(float)
    rows = rows.assign(name=names, shuffles=shuffles.fillna(0)).sort_values("shuffles")
    rows["direction"] = rows["direction"].where(rows["shuffles"] == 0, "shuffled")
    rows = rows.drop_duplicates(["name", "direction"], keep="last").sort_index()
    lines = {name: -i for i, name in enumerate(rows["name"].unique())}
    for direction, offset in OFFSETS.items():
        own = pick(rows, direction=direction)
        if len(own):
            drawn = look(direction)
            bars = np.vstack([own["value"] - own["lo"], own["hi"] - own["value"]])
            ax.errorbar(
                own["value"],
                own["name"].map(lines) + offset,
                xerr=np.nan_to_num(bars).clip(min=0),
                linestyle="none",
                color=drawn.colour,
                marker=drawn.marker,
                label=drawn.label,
                capsize=1.5,
            )
    ax.set_yticks(list(lines.values()), list(lines), fontsize=6)
    ax.set_xlabel("KL from the full cache [nats]")
    model, suite, question, keep = (
        rows[name].iloc[0] for name in ("model", "suite", "question", "keep")
    )
    ax.set_title(
        f"{model}, {suite}, {keep:.0%} kept,\nquestion {question}, {counted(rows, 'items')}"
    )
    legend_below(ax)
