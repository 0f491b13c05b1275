"""The figure of the inversion: how far each control moves perplexity, beside the published text."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from polykv_lib.study.figures.drawing import counted, look
from polykv_lib.study.rows import pick


def ppl_controls(numbers: pd.DataFrame, ax: Axes) -> None:
    """Perplexity change of each control with its interval; published texts as hollow points."""
    changes = pick(numbers, table="controls", metric="ppl_delta_pct")
    ours = pick(changes, kind="measured")
    tokens = ours.groupby("prefix_tokens")["control"].nunique().idxmax()
    rows = pick(ours, prefix_tokens=tokens).set_index("control").iloc[::-1]
    rows = rows.reindex([*rows.index.drop("paper"), "paper"])
    ax.axvline(0, color="black", lw=0.6)
    for y, (name, row) in enumerate(rows.iterrows()):
        bars = np.nan_to_num([[row["value"] - row["lo"]], [row["hi"] - row["value"]]]).clip(min=0)
        drawn = look(str(name))
        ax.errorbar(
            row["value"], y, xerr=bars, color=drawn.colour, marker=drawn.marker, capsize=1.5
        )
    published = pick(changes, kind="paper")
    drawn = look("paper")
    ax.plot(
        published["value"],
        np.full(len(published), len(rows) - 1),
        linestyle="none",
        marker=drawn.marker,
        color=drawn.colour,
        markerfacecolor="white",
        zorder=3,
    )
    ax.set_yticks(range(len(rows)), [look(str(name)).label for name in rows.index])
    ax.set_xlabel("perplexity change [%]; hollow: published, one text each")
    model = ", ".join(ours["model"].unique())
    ax.set_title(f"{model}, {tokens:,.0f} tokens, {counted(rows, 'articles')}")
