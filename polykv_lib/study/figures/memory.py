"""Figures of the memory experiment: bytes over agents and context, and the time of a step."""

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

GEOMETRY, AGENTS, TOKENS = "llama-3-8b", 15, 5035  # the published run that ours stand beside


def memory_vs_agents(numbers: pd.DataFrame, ax: Axes) -> None:
    """GB of KV cache over the number of agents, at one document length."""
    at = _one_geometry(numbers)
    ours = set(pick(at, kind="computed")["context_tokens"])
    tokens = TOKENS if TOKENS in ours else max(ours)
    _memory(pick(at, context_tokens=tokens), "n_agents", ax)
    ax.set_xticks(sorted(at["n_agents"].dropna().unique()))
    ax.set(xlabel="agents", title=f"{at['geometry'].iloc[0]}, {tokens:,.0f} tokens in the pool")


def memory_vs_context(numbers: pd.DataFrame, ax: Axes) -> None:
    """GB of KV cache over the document's length, at one number of agents."""
    at = _one_geometry(numbers)
    built = at["kind"] == "measured"  # a pool is the same for any number of agents
    _memory(at[built | (at["n_agents"] == AGENTS)], "context_tokens", ax)
    ticks_at(ax, pick(at, kind="computed")["context_tokens"])
    ax.set(xlabel="tokens in the pool", title=f"{at['geometry'].iloc[0]}, {AGENTS} agents")


def decode_step(numbers: pd.DataFrame, ax: Axes) -> None:
    """Milliseconds of one decoding step for all agents, by method, on the longest document."""
    times = pick(numbers, table="decode_step", metric="ms_per_step")
    tokens = times["context_tokens"].max()
    times = pick(times, context_tokens=tokens)
    for method in times["method"].unique():
        rows = pick(times, method=method).sort_values("n_agents")
        series(ax, rows["n_agents"], rows, method)
    ax.set(xlabel="agents in one batch", ylabel="one step of all agents [ms]", ylim=(0, None))
    ax.set(xticks=sorted(times["n_agents"].unique()))
    ax.set_title(f"{titled(times, 'rounds')}, {tokens:,.0f} tokens")
    legend_below(ax)


def _one_geometry(numbers: pd.DataFrame) -> pd.DataFrame:
    """The published geometry, or the first of ours where it was left out."""
    ours = list(pick(numbers, table="pool_memory", kind="computed")["geometry"])
    return pick(numbers, table="pool_memory", geometry=GEOMETRY if GEOMETRY in ours else ours[0])


def _memory(at: pd.DataFrame, over: str, ax: Axes) -> None:
    lines = {"without": ("without_bytes", "paper"), "shared": ("shared_bytes", "paper")}
    lines |= {codec: ("pool_bytes", codec) for codec in ("paper", "polykv")}
    for name, (metric, codec) in lines.items():
        rows = pick(at, metric=metric, codec=codec).sort_values(over)
        style = look(name)
        gb = pick(rows, kind="computed")
        width = 3.0 if name == "paper" else 1.2  # the two pools all but coincide
        ax.plot(
            gb[over], gb["value"] / 1e9, c=style.colour, ls=style.line, lw=width, label=style.label
        )
        built = pick(rows, kind="measured")
        where = built[over].fillna(1)  # a pool counted once, for any number of agents
        ax.plot(where, built["value"] / 1e9, c=style.colour, marker=style.marker, ls="")
        paper = pick(rows, kind="paper")
        if len(paper):
            ax.plot(
                paper[over],
                paper["value"] / 1e9,
                c=style.colour,
                marker=style.marker,
                mfc="white",
                ls=(0, (4, 2)),
                lw=0.7,
                label="published (float32 bytes)" if name == "paper" else None,
            )
    log_values(ax)
    ax.set_ylabel("KV cache [GB]")
    legend_below(ax)
