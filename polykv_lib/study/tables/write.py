"""Records in, tables out: Markdown, CSV and LaTeX of one DataFrame each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from polykv_lib.study.published import POOL
from polykv_lib.study.published.arithmetic import arithmetic_findings
from polykv_lib.study.record import Record
from polykv_lib.study.render import fill_between, latex, markdown
from polykv_lib.study.rows import pick, tidy
from polykv_lib.study.store import collect, write_atomically
from polykv_lib.study.tables.comparison import paper_vs_ours, same_protocol
from polykv_lib.study.tables.headlines import headlines
from polykv_lib.study.tables.inversion import decision
from polykv_lib.study.tables.own import OWN, own_table

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One table as it is written."""

    title: str
    frame: pd.DataFrame


def all_tables(records: Sequence[Record], papers_root: Path) -> dict[str, Table]:
    """Every table by file name: the comparison with both papers, then our own numbers."""
    numbers, compared = tidy(records), paper_vs_ours(records, papers_root)
    of_pool = compared["paper table"].str.startswith(POOL)
    tables = {
        "paper_vs_ours": Table(
            title=f"Every number of arXiv {POOL} beside ours", frame=compared[of_pool]
        ),
        "same_protocol": Table(
            title=f"Other models under the 70/30 protocol of arXiv {POOL}: beside, not comparable",
            frame=same_protocol(records, papers_root),
        ),
        "arithmetic": Table(
            title=f"What the numbers of arXiv {POOL} count", frame=arithmetic_findings(papers_root)
        ),
        "inversions": Table(
            title="Documents whose perplexity falls under the pool", frame=inversions(numbers)
        ),
        "inversion_decision": Table(
            title="Does compression regularise? The rule's statistics and its answer",
            frame=decision(numbers),
        ),
        "paper_vs_ours_eviction": Table(
            title=_beside(compared[~of_pool]), frame=compared[~of_pool]
        ),
    }
    return tables | {
        name: Table(title=own.title, frame=own_table(numbers, own)) for name, own in OWN.items()
    }


def _beside(compared: pd.DataFrame) -> str:
    """The title of published numbers, with how many have one of ours beside them."""
    n = int(compared["ours"].notna().sum())
    counted = f"{n} of {len(compared)} run here" if n else "none is run here"
    return f"Published eviction and LongBench numbers: {counted}"


def write_all(results_root: Path, papers_root: Path, out: Path) -> list[Path]:
    """Writes every table that has lines as `<out>/<name>.md`, `.csv` and `.tex`.

    The files of a table that has none, left by earlier results, are removed; others stay.

    Returns:
        The Markdown files, in reading order.
    """
    written = []
    for name, table in all_tables(collect(results_root), papers_root).items():
        if len(table.frame):
            page = f"# {table.title}\n\n{markdown(table.frame)}\n"
            write_atomically(out / f"{name}.csv", table.frame.to_csv(index=False))
            write_atomically(out / f"{name}.tex", f"{latex(table.frame)}\n")
            write_atomically(out / f"{name}.md", page)
            written.append(out / f"{name}.md")
        else:
            for suffix in ("csv", "tex", "md"):
                (out / f"{name}.{suffix}").unlink(missing_ok=True)
    return written


def summary(results_root: Path, papers_root: Path, out: Path) -> str:
    """What `make study` ends with: headlines, the comparison's tally, where the tables are."""
    records = collect(results_root)
    tally = paper_vs_ours(records, papers_root)["status"].value_counts()
    counts = ", ".join(f"{n} {status}" for status, n in tally.items())
    return "\n".join(
        [
            markdown(headlines(tidy(records)).drop(columns="command")),
            "",
            f"Published numbers beside ours: {counts}.",
            f"All tables, and why each number differs or is missing: {out}",
        ]
    )


def readme_table(records: Sequence[Record]) -> str:
    """The README's results: one headline number a line, with the command that measures it."""
    return markdown(headlines(tidy(records)))


def fill_readme(readme: Path, records: Sequence[Record]) -> None:
    """Replaces what stands between the README's two result markers.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: a marker is missing, or the end stands before the beginning.
    """
    fill_between(readme, BEGIN, END, readme_table(records))


def inversions(numbers: pd.DataFrame) -> pd.DataFrame:
    """How many documents get a lower perplexity from the pool than from the full cache."""
    deltas = pick(numbers, table="documents", metric="ppl_delta_pct")
    deltas = deltas[deltas["codec"] != "full"]  # nothing is lost there: rounding of the sum alone
    settings = ("profile", "model", "protocol", "text", "prefix_tokens", "codec")
    by = [column for column in settings if deltas[column].notna().any()]
    lines = [
        {
            **dict(zip(by, setting, strict=True)),
            "documents": len(group),
            "inverted": int((group["value"] < 0).sum()),
            "smallest delta %": group["value"].min(),
            "median delta %": group["value"].median(),
            "largest delta %": group["value"].max(),
        }
        for setting, group in (deltas.groupby(by, dropna=False) if by else ())
    ]
    return pd.DataFrame(lines)
