"""How everything is drawn: one colour, marker and line per method, intervals, byte-stable files."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

COLUMN, TEXT, PAGE = 3.25, 5.5, 6.75  # widths in inches
STYLE = Path(__file__).with_name("polykv.mplstyle")
UNDATED: dict[str, dict[str, Any]] = {
    "pdf": {"CreationDate": None},
    "png": {"Software": None},
    "svg": {"Date": None},
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """A method's name in legends, and its colour (Tol's sets, safe for colour-blind readers)."""

    label: str
    colour: str
    marker: str
    line: str = "-"


LOOKS = {
    "full": Look(label="full precision", colour="#444444", marker="s"),
    "paper": Look(label="paper's codec", colour="#EE6677", marker="o"),
    "polykv": Look(label="polykv", colour="#4477AA", marker="D"),
    "int8": Look(label="int8 keys and values", colour="#228833", marker="^", line="-."),
    "k-only": Look(label="keys only", colour="#B8A000", marker="v", line=":"),
    "v-only": Look(label="values only", colour="#AA3377", marker="<", line=":"),
    "tq2": Look(label="2-bit values", colour="#33AACC", marker="P", line="-."),
    "tq1": Look(label="1-bit values", colour="#117733", marker="1", line="-."),
    "tq4": Look(label="4-bit values", colour="#332288", marker="X", line="-."),
    "tq4-both": Look(label="4-bit keys and values", colour="#661100", marker="H", line="-."),
    "q8-0": Look(label="q8_0", colour="#44AA99", marker=">", line="-."),
    "paper-sinks": Look(label="paper, 4 sinks kept", colour="#DD7711", marker="8"),
    "compact": Look(label="compact", colour="#0B8A8A", marker="*", line="-"),
    "by layer": Look(label="codecs by layer", colour="#332288", marker="."),
    "lean": Look(label="lean", colour="#228855", marker="p", line="-"),
    "shaped": Look(label="shaped", colour="#7A4FBF", marker=r"$\mathbf{S}$"),
    "tiered": Look(label="tiered", colour="#0B5FA5", marker=r"$\mathbf{T}$"),
    **dict.fromkeys(
        ("slim", "shaped4-3-eighth+tq4-2-eighth"),  # the preset, and what it is a name of
        Look(label="slim", colour="#CC3311", marker=r"$\mathbf{L}$", line=":"),
    ),
    "tq3-both": Look(label="3-bit keys and values", colour="#994411", marker="x", line="-."),
    "tq2-both": Look(label="2-bit keys and values", colour="#BB6633", marker="|", line="-."),
    "tq1-both": Look(label="1-bit keys and values", colour="#DD9966", marker="_", line="-."),
    "kivi4": Look(label="KIVI, 4 bits", colour="#999933", marker="h", line=":"),
    "kivi2": Look(label="KIVI, 2 bits", colour="#882255", marker="d", line=":"),
    "paper-plain": Look(label="paper's, without signs", colour="#EE6677", marker="o", line=":"),
    "v-matched": Look(label="values, norms matched", colour="#AA3377", marker="<", line="-."),
    "v-gaussian": Look(label="values, Gaussian noise", colour="#33AACC", marker="P"),
    "v-shrunk": Look(label="values, shrinkage alone", colour="#228833", marker="^"),
    **{
        f"temperature-{t}": Look(label=f"temperature {t}", colour="#888888", marker="p")
        for t in (0.9, 0.95, 1.05, 1.1)
    },
    "without": Look(label="one bf16 copy an agent", colour="#444444", marker="s", line=":"),
    "shared": Look(label="one shared bf16 copy", colour="#888888", marker="p", line="-."),
    "shared-pool": Look(label="one shared pool", colour="#4477AA", marker="D"),
    "expanded-batch": Look(label="a full copy each", colour="#444444", marker="s", line=":"),
    "pooled-agent": Look(label="paper: decompressed each", colour="#EE6677", marker="o", line="-."),
    "expanded-folded": Look(label="a copy each, heads folded", colour="#AA3377", marker="<"),
    "expanded-native": Look(label="a copy each, this kernel", colour="#CC99BB", marker=">"),
    "no-document-native": Look(label="no document, this kernel", colour="#DDDDDD", marker="+"),
    "no-document-folded": Look(label="no document, folded", colour="#BBBBBB", marker="x"),
    "prefill-again": Look(label="read all again", colour="#B8A000", marker="v"),
    "pool": Look(label="pool", colour="#4477AA", marker="D"),
    "unrelated-document": Look(label="unrelated document", colour="#B8A000", marker="v", line="-."),
    "no-document": Look(label="no document", colour="#888888", marker="x", line=":"),
    "paper-b": Look(label="routing by cosine", colour="#EE6677", marker="o"),
    "paper-b, ppl budgets": Look(
        label="the same, PPL budgets", colour="#DD7711", marker="8", line="-."
    ),
    "gain-curve": Look(label="gain x curve, layers", colour="#4477AA", marker="D"),
    "gain-curve-heads": Look(label="gain x curve, heads", colour="#33AACC", marker="P"),
    "ours": Look(label="ours", colour="#4477AA", marker="D"),
    "best single": Look(label="best single policy", colour="#444444", marker="s", line=":"),
    "uniform": Look(label="one policy, equal budgets", colour="#444444", marker="s"),
    "forward": Look(label="as the signal says", colour="#4477AA", marker="D"),
    "inverse": Look(label="the opposite", colour="#EE6677", marker="v"),
    "shuffled": Look(label="other layers, mean", colour="#888888", marker="x"),
    "joint": Look(label="joint plan", colour="#4477AA", marker="D"),
    "codec alone": Look(label="codecs alone", colour="#994411", marker="v"),
    "best single, full": Look(label="best single, bf16", colour="#444444", marker="s", line=":"),
    "best single, quantised": Look(
        label="best single, quantised", colour="#888888", marker="p", line="-."
    ),
    "gain-curve, full": Look(label="gain x curve, bf16", colour="#33AACC", marker="P", line="-."),
    "gain-curve, polykv": Look(
        label="gain x curve, polykv", colour="#AA3377", marker="<", line=":"
    ),
    "gain-curve, shaped": Look(
        label="gain x curve, shaped", colour="#7A4FBF", marker="4", line=":"
    ),
    "gain-curve, tiered": Look(
        label="gain x curve, tiered", colour="#228855", marker="^", line="-."
    ),
    "gain-curve, shaped-tq3+tq4-2": Look(
        label="gain x curve, 3-bit keys", colour="#0B8A8A", marker="*", line=":"
    ),
    "H2O": Look(label="H2O", colour="#4477AA", marker="s"),
    "TOVA": Look(label="TOVA", colour="#EE6677", marker="o"),
    "SnapKV": Look(label="SnapKV", colour="#228833", marker="^"),
    "KeyDiff": Look(label="KeyDiff", colour="#B8A000", marker="v"),
    "CAKE": Look(label="CAKE", colour="#AA3377", marker="<"),
    "StreamingLLM": Look(label="StreamingLLM", colour="#888888", marker="p"),
    "CAM": Look(label="CaM", colour="#33AACC", marker="P"),
    "D2O": Look(label="D2O", colour="#332288", marker="X"),
    "Scissorhands": Look(label="Scissorhands", colour="#117733", marker="1"),
    "ExpectedAttention": Look(label="expected attention", colour="#DD7711", marker="8"),
    "KeyNorm": Look(label="key norm", colour="#661100", marker="H"),
    "H2O+KeyDiff": Look(label="H2O + KeyDiff", colour="#44AA99", marker=">"),
    "Random": Look(label="random", colour="#BBBBBB", marker="x"),
}
OTHER = Look(label="", colour="#000000", marker="*", line=":")


def look(name: str) -> Look:
    """The look of a codec, method or control; one the map does not know is black and named so."""
    return LOOKS.get(name, Look(label=name, colour=OTHER.colour, marker=OTHER.marker, line=":"))


@contextmanager
def house_style() -> Iterator[None]:
    """The one style file, for the duration of a block; nothing global is changed."""
    with style.context(STYLE):
        yield


def series(
    ax: Axes, x: pd.Series, rows: pd.DataFrame, name: str, label: str = "", *, hollow: bool = False
) -> None:
    """One method's values over `x` as a line with markers, its 95 % intervals as bars."""
    drawn = look(name)
    low, high = rows["value"] - rows["lo"], rows["hi"] - rows["value"]
    bars = np.vstack([low.fillna(0).clip(lower=0), high.fillna(0).clip(lower=0)])
    ax.errorbar(
        x,
        rows["value"],
        yerr=bars if bars.any() else None,
        label=label or drawn.label,
        color=drawn.colour,
        marker=drawn.marker,
        linestyle=drawn.line,
        markerfacecolor="white" if hollow else drawn.colour,
        elinewidth=0.8,
        capsize=1.5,
    )


def ticks_at(ax: Axes, values: pd.Series) -> None:
    """Ticks on the x axis where something was measured, written out, log-2 spaced.

    A tick close to the one before it is written a line lower.
    """
    ticks = sorted(values.unique())
    lower = {tick for before, tick in pairwise(ticks) if tick < 1.3 * before}
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, ["\n" * (tick in lower) + f"{tick:,.0f}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())


def log_values(ax: Axes, of: Literal["x", "y"] = "y") -> None:
    """A logarithmic axis with ticks at 1, 2 and 5 times a power of ten, written out."""
    ax.set(**{f"{of}scale": "log"})
    axis = ax.xaxis if of == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.12f}".rstrip("0").rstrip(".")))


def legend_below(ax: Axes) -> None:
    """The legend under the axes, where it covers no number."""
    figure = ax.get_figure(root=True)
    if figure is not None:
        columns = 2 if figure.get_figwidth() < TEXT else 3
        figure.legend(loc="outside lower center", ncols=columns, columnspacing=1.2)


def write_beside(ax: Axes, text: str) -> None:
    """A small remark along the right edge."""
    side = ax.text(1.015, 0.5, text, color="0.5", fontsize=7, rotation=90, va="center")
    side.set_transform(ax.transAxes)


def counted(rows: pd.DataFrame, of: str) -> str:
    """How many documents or answers the intervals are over: "n = 12 articles"."""
    n = rows["n"].dropna()
    if n.empty:
        return ""
    span = f"{n.min():.0f}" if n.min() == n.max() else f"{n.min():.0f} to {n.max():.0f}"
    return f"n = {span} {of}"


def titled(rows: pd.DataFrame, of: str) -> str:
    """The models that rows are about, and how many the intervals are over."""
    models = ", ".join(sorted(rows["model"].dropna().unique()))
    return ", ".join(part for part in (models, counted(rows, of)) if part)


def save(figure: Figure, out: Path, name: str, formats: tuple[str, ...]) -> list[Path]:
    """Writes `<out>/<name>.<format>`, the same bytes each time."""
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{name}.{format_}" for format_ in formats]
    for file in files:
        figure.savefig(file, metadata=UNDATED[file.suffix[1:]])
    return files
