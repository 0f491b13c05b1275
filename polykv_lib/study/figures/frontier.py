"""The figure of the codec frontier: KL against bits, on the articles that nothing was chosen on."""

import pandas as pd
from matplotlib.axes import Axes

from polykv_lib.study.figures.drawing import LOOKS, counted, legend_below, log_values, look, series
from polykv_lib.study.rows import pick

BY_LAYER = "by layer"


def codec_frontier(numbers: pd.DataFrame, ax: Axes) -> None:
    """Codecs with a name, other pairs as dots, codecs by layer as a line; all measured here."""
    report = pick(numbers, table="frontier", role="report")
    bits = pick(report, metric="bits_per_element").set_index("codec")["value"].sort_values()
    kl = pick(report, metric="kl_nats").set_index("codec").loc[bits.index]
    by_layer = [codec for codec in bits.index if codec.startswith(BY_LAYER)]
    named = [codec for codec in bits.index if codec in LOOKS]
    pairs = bits.index.difference([*by_layer, *named], sort=False)
    ax.plot(bits[pairs], kl.loc[pairs, "value"], ".", color="#BBBBBB", label="other pairs")
    for codec in named:
        series(ax, bits[[codec]], kl.loc[[codec]], codec)
    for goal in kl["value"][kl.index == "paper"]:
        ax.axhline(goal, color=look("paper").colour, lw=0.6, ls="--")
    if by_layer:
        series(ax, bits[by_layer], kl.loc[by_layer], BY_LAYER)
    log_values(ax)
    ax.set_xlabel("bits an element, all stored bytes counted")
    ax.set_ylabel("KL from the full cache [nats]")
    ax.set_title(f"{', '.join(report['model'].unique())}, {counted(kl, 'articles')}")
    legend_below(ax)
