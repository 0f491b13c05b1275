"""What the published numbers of arXiv 2604.24971 count, recomputed from shapes and printed values.

No model and no tensor is needed: every finding is one line of arithmetic, shown as its step.
1 GB is 1e9 bytes throughout, as in the paper.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path

import pandas as pd

from polykv_lib.study.published.numbers import (
    BYTES,
    PREFIX_SHARE,
    SHAPES,
    Run,
    cached_tokens,
    copy_gb,
    pool_formats,
    pool_gb,
    published_runs,
    scored_tokens,
)

PAIR_BITS = 8 + 3  # one key element and one value element, as the paper accounts them
PRINTED_RATIO, PRINTED_GOOD_F1 = 2.91, 0.92
ROBERTA_LARGE_BASELINE_F1 = 0.83123  # bert_score's own English rescale baseline, layer 17
KL_NATS = (0.004, 0.02)  # per token, int8 keys and 3-bit values: small models here; 1.5B, reported
SUFFIX_TOKENS = 220  # one agent's question and up to 200 new tokens


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One computed number; `step` is its arithmetic, `printed` what the paper prints."""

    topic: str
    quantity: str
    step: str
    value: float
    unit: str
    printed: float | None = None
    digits: int = 3

    @property
    def agrees(self) -> str:
        """Whether the value rounds to the printed one; empty where nothing is printed."""
        if self.printed is None:
            return ""
        return "yes" if abs(self.value - self.printed) <= 0.5001 * 10**-self.digits else "no"


def arithmetic_findings(papers_root: Path) -> pd.DataFrame:
    """Everything the published pool numbers count, one line of arithmetic a row.

    Args:
        papers_root: the folder with `pool_memory.csv` and `pool_quality.csv`.

    Returns:
        Columns topic, quantity, step, value, unit, printed, agrees.
    """
    memory = published_runs(papers_root, "pool_memory")
    quality = published_runs(papers_root, "pool_quality")
    rows = [
        {**asdict(finding), "agrees": finding.agrees}
        for findings in (
            _without(memory),
            _with(memory),
            _reduction(memory),
            _true_pool(memory),
            _perplexity(quality),
            _bertscore(quality),
        )
        for finding in findings
    ]
    return pd.DataFrame(rows).drop(columns="digits")


def _without(memory: list[Run]) -> Iterator[Finding]:
    for run in memory:
        shape, n, tokens = SHAPES[run["model"]], run["n_agents"], cached_tokens(run["label_tokens"])
        for dtype in BYTES:
            width = shape.elements_per_token * BYTES[dtype]
            yield Finding(
                topic=f"'without' column, label {run['label_tokens']:,}, {n} agents",
                quantity=f"{n} private copies of {tokens:,} tokens in {dtype}",
                step=f"{n} x int({PREFIX_SHARE} x {run['label_tokens']:,}) x {width:,} B",
                value=n * copy_gb(shape, tokens, dtype),
                unit="GB",
                printed=run["without_gb"],
            )


def _with(memory: list[Run]) -> Iterator[Finding]:
    yield Finding(
        topic="compression ratio",
        quantity="16-bit keys and values over int8 keys and 3-bit values; no data in it",
        step=f"(16 + 16) / (8 + 3) = 32/{PAIR_BITS}",
        value=32 / PAIR_BITS,
        unit="x",
        printed=PRINTED_RATIO,
        digits=2,
    )
    for run in {run["label_tokens"]: run for run in memory}.values():
        tokens = cached_tokens(run["label_tokens"])
        copy = copy_gb(SHAPES[run["model"]], tokens, "float32")
        yield Finding(
            topic=f"'with' column, label {run['label_tokens']:,}",
            quantity="one float32 copy divided by the 16-bit ratio: both columns are doubled",
            step=f"{copy:.4f} GB x {PAIR_BITS}/32",
            value=copy * PAIR_BITS / 32,
            unit="GB",
            printed=run["with_gb"],
        )


def _reduction(memory: list[Run]) -> Iterator[Finding]:
    for run in memory:
        n = run["n_agents"]
        topic = f"reduction, label {run['label_tokens']:,}, {n} agents"
        total, sharing = 100 * (1 - PAIR_BITS / (32 * n)), 100 * (1 - 1 / n)
        yield Finding(
            topic=topic,
            quantity="one pool against N copies",
            step=f"1 - {PAIR_BITS}/(32 x {n})",
            value=total,
            unit="%",
            printed=run["reduction_pct"],
            digits=1,
        )
        yield Finding(
            topic=topic,
            quantity="of which sharing one uncompressed copy",
            step=f"1 - 1/{n}",
            value=sharing,
            unit="%",
        )
        yield Finding(
            topic=topic,
            quantity="of which compression adds",
            step=f"{total:.2f} - {sharing:.2f}",
            value=total - sharing,
            unit="points",
        )


def _true_pool(memory: list[Run]) -> Iterator[Finding]:
    largest = max(memory, key=lambda run: run["without_gb"])
    shape, n = SHAPES[largest["model"]], largest["n_agents"]
    tokens = cached_tokens(largest["label_tokens"])
    topic, copy = f"pool of {tokens:,} tokens", copy_gb(shape, tokens, "bfloat16")
    for name, bits in pool_formats(shape.head_dim).items():
        size = pool_gb(shape, tokens, bits)
        yield Finding(
            topic=topic,
            quantity=name,
            step=f"{tokens:,} x {shape.elements_per_token // 2:,} x {bits:g} bits / 8",
            value=size,
            unit="GB",
        )
        yield Finding(
            topic=topic,
            quantity=f"{name}: one bfloat16 copy over it",
            step=f"{copy:.4f} / {size:.4f}",
            value=copy / size,
            unit="x",
        )
    yield Finding(
        topic="memory while decoding",
        quantity=f"{n} agents alive, each holding its decompressed bfloat16 cache",
        step=f"{n} x {copy:.4f} GB",
        value=n * copy,
        unit="GB",
    )
    yield Finding(
        topic="memory while decoding",
        quantity=f"private suffixes of {n} agents ({SUFFIX_TOKENS} tokens each), counted nowhere",
        step=f"{n} x {SUFFIX_TOKENS} x {shape.elements_per_token * 2:,} B",
        value=n * copy_gb(shape, SUFFIX_TOKENS, "bfloat16"),
        unit="GB",
    )


def _perplexity(quality: list[Run]) -> Iterator[Finding]:
    for run in {(run["model"], run["text"], run["label_tokens"]): run for run in quality}.values():
        topic = f"perplexity, {run['model']}, {run['text']}, label {run['label_tokens']:,}"
        n, delta = scored_tokens(run["label_tokens"]), 100 * (run["ppl_pool"] / run["ppl_full"] - 1)
        yield Finding(
            topic=topic,
            quantity="delta",
            step=f"{run['ppl_pool']} / {run['ppl_full']} - 1",
            value=delta,
            unit="%",
            printed=run["ppl_delta_pct"],
            digits=2,
        )
        for kl in KL_NATS:
            error = 100 * sqrt(2 * kl / n)
            yield Finding(
                topic=topic,
                quantity=f"delta in paired standard errors, if KL is {kl} nats",
                step=f"{abs(delta):.2f} / (100 sqrt(2 x {kl} / {n:,}) = {error:.2f})",
                value=abs(delta) / error,
                unit="SE",
            )


def _bertscore(quality: list[Run]) -> Iterator[Finding]:
    floor = ROBERTA_LARGE_BASELINE_F1
    printed = {
        f"{run['n_agents']} agents, label {run['label_tokens']:,}": run["bertscore_f1_mean"]
        for run in quality
        if not pd.isna(run["bertscore_f1_mean"])
    } | {"the threshold called good": PRINTED_GOOD_F1}
    for name, f1 in printed.items():
        yield Finding(
            topic="BERTScore F1 after baseline rescaling",
            quantity=name,
            step=f"({f1} - {floor}) / (1 - {floor})",
            value=(f1 - floor) / (1 - floor),
            unit="F1",
        )
