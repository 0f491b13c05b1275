"""Figures of quality: perplexity over context, KL over bits, agents' answers over their number."""

import pandas as pd
from matplotlib.axes import Axes

from polykv_lib.study.figures.drawing import (
    legend_below,
    log_values,
    look,
    series,
    ticks_at,
    titled,
)
from polykv_lib.study.rows import pick


def ppl_vs_context(numbers: pd.DataFrame, ax: Axes) -> None:
    """Perplexity change with its interval, for each codec run at every number of tokens."""
    deltas = pick(numbers, table="ppl", metric="ppl_delta_pct")
    protocol = min(deltas["protocol"])  # "fixed-window" comes before "paper-70-30"
    deltas = pick(deltas, protocol=protocol)
    ax.axhline(0, color="black", lw=0.6)
    lengths = deltas.groupby("codec", sort=False)["prefix_tokens"].nunique()
    codecs = [c for c in lengths[lengths == lengths.max()].index if c != "full"]
    for i, codec in enumerate(codecs):
        rows = pick(deltas, codec=codec).sort_values("prefix_tokens")
        aside = 1.035 ** (i - (len(codecs) - 1) / 2)  # so that intervals do not cover each other
        series(ax, rows["prefix_tokens"] * aside, rows, codec)
    ticks_at(ax, deltas["prefix_tokens"])
    ax.set(xlabel="tokens in the pool", ylabel="perplexity change [%]")
    ax.set_title(f"{titled(deltas, 'articles')}, {protocol}")
    legend_below(ax)


def kl_vs_bits(numbers: pd.DataFrame, ax: Axes) -> None:
    """KL from the full cache over the bits one element takes, one point a codec."""
    bits = pick(numbers, table="kl_vs_bits", metric="bits_per_element").set_index("codec")["value"]
    kl = pick(numbers, table="kl_vs_bits", metric="kl_nats")
    for codec in bits.sort_values().index:
        rows = pick(kl, codec=codec)
        if codec != "full":
            series(ax, bits[[codec] * len(rows)], rows, codec)
    log_values(ax)
    ax.set_xlabel("bits an element, all stored bytes counted")
    ax.set(ylabel="KL from the full cache [nats]", title=titled(kl, "articles"))
    legend_below(ax)


def fidelity_vs_agents(numbers: pd.DataFrame, ax: Axes) -> None:
    """BERTScore F1 against the full cache's answers over the number of agents, with controls."""
    scores = pick(numbers, table="fidelity", metric="bertscore_f1")
    scores = scores[scores["rescaled"] != True]  # noqa: E712 - a column of True, False and None
    if scores["context_tokens"].notna().any():
        scores = pick(scores, context_tokens=scores["context_tokens"].max())
    answers = pick(scores, control="pool")
    for codec in answers["codec"].unique():
        rows = pick(answers, codec=codec).sort_values("n_agents")
        series(ax, rows["n_agents"], rows, codec, f"pool: {look(codec).label}")
    for control in ("unrelated-document", "no-document"):
        rows = pick(scores, control=control).sort_values("n_agents").drop_duplicates("n_agents")
        series(ax, rows["n_agents"], rows, control)
    encoders = ", ".join(sorted(scores["encoder"].dropna().unique()))
    ax.set(xlabel="agents in one batch", ylabel=f"BERTScore F1\n({encoders})")
    tokens = "".join(f", {n:,.0f} tokens" for n in scores["context_tokens"].dropna().unique())
    ax.set(title=titled(scores, "articles") + tokens, xticks=sorted(scores["n_agents"].unique()))
    legend_below(ax)
