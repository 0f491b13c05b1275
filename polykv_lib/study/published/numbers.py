"""The published numbers as rows, and the shapes and byte counts behind them.

`data/papers/*.csv` keeps one line a published run; here every number becomes one row of its own.
1 GB is 1e9 bytes throughout, as in the papers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from polykv_lib.study.published.tasks import Scored, scored_of

PREFIX_SHARE = 0.7  # the first 70 % of a text is prefilled and compressed, the rest is scored
BYTES = {"float32": 4, "bfloat16": 2}
REAL_TOKENS = {600: 826}  # the label "600" counts words; the published text has 826 tokens
POOL, EVICTION = "2604.24971", "2606.15157v1"

_MEMORY = {"without_gb": "GB", "with_gb": "GB", "reduction_pct": "%"}
_QUALITY = {"ppl_full": "ppl", "ppl_pool": "ppl", "ppl_delta_pct": "%", "bertscore_f1_mean": "F1"}
_TASK_FILES = {  # file -> the columns that name a row; every other number is a score
    "evict_main": ["benchmark", "avg_budget"],
    "evict_sweep": ["avg_budget"],
    "evict_signals": ["decision", "signal", "phase"],
    "evict_categories": ["model"],
    "turboquant_longbench": ["method", "kv_bits"],
    "baselines_longbench16_llama31": ["method", "budget"],
}
_MODEL_OF_COLUMN = {"llama": "LLaMA-3.1-8B", "qwen": "Qwen3-8B"}
Run = dict[str, Any]  # one line of a published CSV file
_NOT_A_SCORE = ["source", "table", "model", "best_baseline_name"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The numbers that fix how much KV one token needs."""

    n_layers: int
    n_kv_heads: int
    head_dim: int

    @property
    def elements_per_token(self) -> int:
        """Key and value elements of one token, all layers together."""
        return 2 * self.n_layers * self.n_kv_heads * self.head_dim


SHAPES = {
    "Llama-3-8B-Instruct": Shape(n_layers=32, n_kv_heads=8, head_dim=128),
    "SmolLM2-1.7B-Instruct": Shape(n_layers=24, n_kv_heads=32, head_dim=64),
}


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published number, where it stands, and what a matching run of ours would have to be."""

    paper: str
    table: str
    row: str
    metric: str
    unit: str
    value: float
    model: str
    text: str = ""
    label_tokens: int = 0
    n_agents: int = 0
    scored: Scored | str = ""  # of a benchmark: what was scored, or why it cannot be here


def cached_tokens(label_tokens: int) -> int:
    """Tokens really held in the cache of a run labelled with its whole text, int(0.7 T)."""
    return int(PREFIX_SHARE * REAL_TOKENS.get(label_tokens, label_tokens))


def scored_tokens(label_tokens: int) -> int:
    """Continuation tokens behind a perplexity; the first one has no prediction and is dropped."""
    return REAL_TOKENS.get(label_tokens, label_tokens) - cached_tokens(label_tokens) - 1


def copy_gb(shape: Shape, n_tokens: int, dtype: str) -> float:
    """GB of one uncompressed KV copy of `n_tokens` in `dtype`."""
    return n_tokens * shape.elements_per_token * BYTES[dtype] / 1e9


def pool_gb(shape: Shape, n_tokens: int, bits_per_pair: float) -> float:
    """GB of one pool in which a key element and a value element together take `bits_per_pair`."""
    return n_tokens * shape.elements_per_token / 2 * bits_per_pair / 8 / 1e9


def pool_formats(head_dim: int) -> dict[str, float]:
    """Bits for one key element plus one value element, by what is counted or stored.

    A norm is one number a value row; a per-tensor key scale (4 bytes a layer) is left out.
    """
    return {
        "as accounted: int8 keys, 3-bit values, no norms": 8.0 + 3,
        "packed, fp16 norms": 8 + 3 + 16 / head_dim,
        "packed, fp32 norms": 8 + 3 + 32 / head_dim,
        "real q8_0 keys (8.5 bits), packed values, fp16 norms": 8.5 + 3 + 16 / head_dim,
        "as the published code allocates: a byte a value code, fp32 norms": 8 + 8 + 32 / head_dim,
    }


def published_runs(papers_root: Path, name: str) -> list[Run]:
    """The lines of one published CSV file, each as column -> value; what is not printed is NA."""
    frame = pd.read_csv(papers_root / f"{name}.csv", dtype={"source": str}).convert_dtypes()
    return [
        {str(column): value for column, value in run.items()} for run in frame.to_dict("records")
    ]


def published_rows(papers_root: Path) -> list[Published]:
    """Every number of `data/papers/*.csv`, the shared-pool paper first.

    Raises:
        FileNotFoundError: a CSV is missing from `papers_root`.
    """
    tasks = [row for name in _TASK_FILES for row in _task_rows(papers_root, name)]
    return [*_memory_rows(papers_root), *_quality_rows(papers_root), *tasks]


def _memory_rows(papers_root: Path) -> Iterator[Published]:
    for run in published_runs(papers_root, "pool_memory"):
        for metric, unit in _MEMORY.items():
            yield Published(
                paper=POOL,
                table=run["table"],
                row=f"{run['label_tokens']:,} tokens, {run['n_agents']} agents",
                metric=metric,
                unit=unit,
                value=run[metric],
                model=run["model"],
                label_tokens=run["label_tokens"],
                n_agents=run["n_agents"],
            )


def _quality_rows(papers_root: Path) -> Iterator[Published]:
    for run in published_runs(papers_root, "pool_quality"):
        printed = {metric: (run[metric], unit) for metric, unit in _QUALITY.items()}
        overlaps = run["token_overlap_per_agent"]
        if isinstance(overlaps, str):
            for agent, overlap in enumerate(overlaps.split(";")):
                printed[f"token_overlap, agent {agent}"] = (float(overlap), "share")
        for metric, (value, unit) in printed.items():
            if not pd.isna(value):
                yield Published(
                    paper=POOL,
                    table="quality",
                    row=f"{run['text']}, {run['label_tokens']:,} tokens, {run['n_agents']} agents",
                    metric=metric,
                    unit=unit,
                    value=value,
                    model=run["model"],
                    text=run["text"],
                    label_tokens=run["label_tokens"],
                    n_agents=run["n_agents"],
                )


def _task_rows(papers_root: Path, name: str) -> Iterator[Published]:
    naming = _TASK_FILES[name]
    for run in published_runs(papers_root, name):
        for metric in run:
            if metric not in {*_NOT_A_SCORE, *naming} and not pd.isna(run[metric]):
                yield Published(
                    paper=run["source"],
                    table=f"Table {run['table']}" if "table" in run else name,
                    row=", ".join(
                        f"{run[column]}" for column in naming if not pd.isna(run[column])
                    ),
                    metric=metric,
                    unit="score",
                    value=float(run[metric]),
                    model=run.get(
                        "model", _MODEL_OF_COLUMN.get(metric.split("_")[0], "Llama-3.1-8B")
                    ),
                    scored=scored_of(name, run, metric),
                )
