"""Every figure: which table it needs, how large it is, and what it was drawn from.

Filled markers are ours, hollow ones with dashed lines are published; lines without markers are
computed from shapes. Bars are 95 % intervals.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from polykv_lib.study.figures import eviction
from polykv_lib.study.figures.ablations import signals_by_decision, signals_by_phase
from polykv_lib.study.figures.drawing import COLUMN, TEXT, house_style, save, write_beside
from polykv_lib.study.figures.frontier import codec_frontier
from polykv_lib.study.figures.inversion import ppl_controls
from polykv_lib.study.figures.joint import joint_plan
from polykv_lib.study.figures.memory import decode_step, memory_vs_agents, memory_vs_context
from polykv_lib.study.figures.quality import fidelity_vs_agents, kl_vs_bits, ppl_vs_context
from polykv_lib.study.figures.throughput import (
    first_token_vs_context,
    held_vs_agents,
    step_vs_context,
    throughput_vs_agents,
)
from polykv_lib.study.platform import Places
from polykv_lib.study.published.points import published_inversions, published_memory
from polykv_lib.study.record import Record
from polykv_lib.study.rows import pick, tidy
from polykv_lib.study.store import collect, write_atomically


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure: what draws it, the table it needs and its size in inches."""

    draw: Callable[[pd.DataFrame, Axes], None]
    table: str
    width: float = COLUMN
    height: float = 2.9
    by: tuple[str, ...] = ()  # one figure for each value of these columns


FIGURES = {
    "memory_vs_agents": Drawing(draw=memory_vs_agents, table="pool_memory"),
    "memory_vs_context": Drawing(draw=memory_vs_context, table="pool_memory"),
    "ppl_vs_context": Drawing(draw=ppl_vs_context, table="ppl", width=TEXT),
    "ppl_controls": Drawing(draw=ppl_controls, table="controls", width=TEXT),
    "codec_frontier": Drawing(draw=codec_frontier, table="frontier", width=TEXT),
    "joint_plan": Drawing(
        draw=joint_plan, table="joint", width=TEXT, height=3.6, by=("suite", "question")
    ),
    "kl_vs_bits": Drawing(draw=kl_vs_bits, table="kl_vs_bits", width=TEXT),
    "fidelity_vs_agents": Drawing(draw=fidelity_vs_agents, table="fidelity"),
    "decode_step": Drawing(draw=decode_step, table="decode_step"),
    "recovery_by_family": Drawing(
        draw=eviction.recovery_by_family, table="recovery", width=TEXT, by=("suite", "question")
    ),
    "budget_sweep": Drawing(draw=eviction.budget_sweep, table="recovery"),
    "budget_sweep_gap": Drawing(draw=eviction.budget_sweep_gap, table="recovery"),
    "plan_map": Drawing(draw=eviction.plan_map, table="plan", width=TEXT, by=("suite", "question")),
    "signals_by_decision": Drawing(draw=signals_by_decision, table="ablations", width=TEXT),
    "signals_by_phase": Drawing(draw=signals_by_phase, table="phases", width=TEXT),
    "throughput_vs_agents": Drawing(draw=throughput_vs_agents, table="throughput", width=TEXT),
    "step_vs_context": Drawing(draw=step_vs_context, table="throughput", width=TEXT),
    "held_vs_agents": Drawing(draw=held_vs_agents, table="throughput", width=TEXT),
    "first_token_vs_context": Drawing(draw=first_token_vs_context, table="first_token", width=TEXT),
}


def write_all(
    results_root: Path,
    out: Path,
    formats: Sequence[str] = ("pdf", "png"),
    papers_root: Path | None = None,
) -> list[Path]:
    """Draws every figure that has numbers, one file a profile, and `<out>/manifest.json`.

    The manifest maps each figure to the records it was drawn from and a hash of their rows, so that
    a figure older than its results can be told.

    Args:
        results_root: stored records, of one profile or of all.
        out: folder for the figures.
        formats: "pdf", "png" or both.
        papers_root: published numbers; the checkout's `data/papers` if None.

    Returns:
        The files drawn.
    """
    records = collect(results_root)
    papers = papers_root or Places.at().papers
    published = pd.concat([published_memory(papers), published_inversions(papers)])
    files, manifest = [], {}
    with house_style():
        for profile, numbers in tidy(records).groupby("profile"):
            for name, drawing, used in _drawings(numbers):
                figure = Figure(figsize=(drawing.width, drawing.height))
                ax = figure.subplots()
                drawing.draw(pd.concat([used, published]), ax)
                write_beside(ax, f"profile {profile}")
                files += save(figure, out, f"{name}-{profile}", tuple(formats))
                manifest[f"{name}-{profile}"] = _fingerprints(records, set(used["key"]))
    write_atomically(out / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    return files


def _drawings(numbers: pd.DataFrame) -> Iterator[tuple[str, Drawing, pd.DataFrame]]:
    """Each figure that has numbers: its name, how it is drawn, and from which lines."""
    for name, drawing in FIGURES.items():
        used = pick(numbers, table=drawing.table)
        if not drawing.by and len(used):
            yield name, drawing, used
        elif drawing.by:
            for values, part in used.groupby(list(drawing.by), sort=False):
                yield "-".join([name, *map(str, values)]), drawing, part


def _fingerprints(records: Sequence[Record], keys: set[str]) -> dict[str, str]:
    """Of each record used, a hash of its rows."""
    return {
        f"{record.experiment}/{record.key}": hashlib.sha256(
            "".join(row.model_dump_json() for row in record.rows).encode()
        ).hexdigest()[:16]
        for record in records
        if record.key in keys
    }
