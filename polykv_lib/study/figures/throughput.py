"""Figures of the throughput experiment: rate, step, bytes and first token, by method."""

import pandas as pd
from matplotlib.axes import Axes

from polykv_lib.study.figures.drawing import (
    counted,
    legend_below,
    log_values,
    look,
    series,
    ticks_at,
)
from polykv_lib.study.rows import on_device, pick

SETTING = ("model", "device", "dtype", "threads")
TOKENS, AGENTS = 2048, 15  # shown where they were measured, else the most there are


def throughput_vs_agents(numbers: pd.DataFrame, ax: Axes) -> None:
    """New tokens a second of all agents together, over how many there are."""
    rows = _one_setting(pick(numbers, table="throughput", metric="tokens_per_s"))
    rows, tokens = _at(rows, "context_tokens", TOKENS)
    _lines(rows, "n_agents", ax)
    ax.set(xlabel="agents in one step", ylabel="new tokens a second, all agents")
    ax.set_title(_title(rows, f"{tokens:,.0f} tokens"))
    legend_below(ax)


def step_vs_context(numbers: pd.DataFrame, ax: Axes) -> None:
    """Milliseconds of one step of all agents, over the document's length."""
    rows = _one_setting(pick(numbers, table="throughput", metric="step_ms"))
    rows, agents = _at(rows, "n_agents", AGENTS)
    _lines(rows, "context_tokens", ax)
    ax.set(xlabel="tokens in the document", ylabel="one step of all agents [ms]")
    ax.set_title(_title(rows, f"{agents:.0f} agents"))
    legend_below(ax)


def held_vs_agents(numbers: pd.DataFrame, ax: Axes) -> None:
    """Bytes of pool and caches, counted from tensors, over the number of agents."""
    rows = _one_setting(pick(numbers, table="throughput", metric="held_bytes"))
    rows, tokens = _at(rows, "context_tokens", TOKENS)
    _lines(rows.assign(value=rows["value"] / 1e6), "n_agents", ax)
    ax.set(xlabel="agents in one step", ylabel="pool and caches held [MB]")
    ax.set_title(_title(rows, f"{tokens:,.0f} tokens"))
    legend_below(ax)


def first_token_vs_context(numbers: pd.DataFrame, ax: Axes) -> None:
    """Milliseconds until a new agent's first token, over the document's length."""
    rows = _one_setting(pick(numbers, table="first_token", metric="ms"))
    _lines(rows, "context_tokens", ax)
    ax.set(xlabel="tokens in the document", ylabel="first token of a new agent [ms]")
    ax.set_title(_title(rows, ""))
    legend_below(ax)


def _lines(rows: pd.DataFrame, over: str, ax: Axes) -> None:
    rows = rows[rows["value"].notna()]
    for (method, codec), line in rows.groupby(["method", "codec"], sort=False, dropna=False):
        line = line.sort_values(over)
        name, label = str(method), ""
        if method == "shared-pool":
            name = "shared" if codec == "full" else str(codec)
            label = "" if codec == "full" else f"pool, {look(name).label}"
        series(ax, line[over], line, name, label)
    ticks_at(ax, rows[over])
    log_values(ax)


def _one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the first model, device, dtype and thread count; others are in the tables."""
    return pick(rows, **{name: rows[name].iloc[0] for name in SETTING})


def _at(rows: pd.DataFrame, size: str, wanted: int) -> tuple[pd.DataFrame, int | float]:
    """The rows of one size: the wanted one, or the largest where that was not measured."""
    chosen = wanted if (rows[size] == wanted).any() else rows[size].max()
    return pick(rows, **{size: chosen}), chosen


def _title(rows: pd.DataFrame, size: str) -> str:
    first = rows.iloc[0]
    named = (first["model"], first["dtype"], on_device(first))
    return ", ".join(part for part in (*named, size, counted(rows, "rounds")) if part)
