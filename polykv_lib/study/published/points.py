"""Published numbers as rows of kind "paper", for figures to draw beside ours."""

from pathlib import Path

import pandas as pd

from polykv_lib.study.published.numbers import cached_tokens, published_runs
from polykv_lib.study.rows import family


def published_memory(papers_root: Path) -> pd.DataFrame:
    """The published memory column by column, as rows of kind "paper"."""
    lines = [
        {
            "table": "pool_memory",
            "kind": "paper",
            "metric": metric,
            "value": run[column] * 1e9,
            "geometry": family(run["model"]),
            "context_tokens": cached_tokens(run["label_tokens"]),
            "n_agents": run["n_agents"],
            "codec": "paper",
        }
        for run in published_runs(papers_root, "pool_memory")
        for column, metric in (("without_gb", "without_bytes"), ("with_gb", "pool_bytes"))
    ]
    return pd.DataFrame(lines)


def published_inversions(papers_root: Path) -> pd.DataFrame:
    """The published changes of perplexity, one a model and text, as rows of kind "paper"."""
    runs = published_runs(papers_root, "pool_quality")
    changes = {(run["model"], run["text"]): float(run["ppl_delta_pct"]) for run in runs}
    return pd.DataFrame(
        {
            "table": "controls",
            "kind": "paper",
            "metric": "ppl_delta_pct",
            "value": change,
            "model": model,
            "control": "paper",
        }
        for (model, _), change in changes.items()
    )
