"""The figure of the joint plan: KL against bytes, every method filling the same budgets."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from polykv_lib.study.figures.drawing import counted, legend_below, log_values, series
from polykv_lib.study.rows import pick


def joint_plan(numbers: pd.DataFrame, ax: Axes) -> None:
    """A line a method; where no codec of a family is small enough, its line ends."""
    kl = pick(numbers, table="joint", metric="kl_nats", family="macro")
    methods = list(kl["method"].unique())
    for i, method in enumerate(methods):
        rows = pick(kl, method=method).sort_values("bytes_share")
        aside = 1.02 ** (i - (len(methods) - 1) / 2)  # so that intervals do not cover each other
        series(ax, rows["bytes_share"] * aside, rows, method)
    log_values(ax)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(kl["bytes_share"].unique())))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"1/{1 / share:.0f}"))
    ax.set(xlabel="bytes of one bf16 copy", ylabel="KL from the full cache [nats]")
    model, suite, question = (kl[name].iloc[0] for name in ("model", "suite", "question"))
    ax.set_title(f"{model}, {suite}, question {question}, {counted(kl, 'items')}")
    legend_below(ax)
