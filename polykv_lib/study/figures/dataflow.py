"""README's data-flow picture: `python -m polykv_lib.study.figures.dataflow figures` draws it."""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

from polykv_lib.study.figures.drawing import house_style, save

WIDTH, HEIGHT = 11.0, 4.0  # inches; one unit of the drawing is one inch
INK, QUIET = "#26323F", "#7A8794"
KEY, VALUE, POOL, PLAIN = "#EE6677", "#4477AA", "#CCBB44", "#8895A2"
AGENTS = ("agent 1", "agent 2", "agent N")


def draw(ax: Axes) -> None:
    """Document, prefill, eviction, quantisation, one pool, N agents in one batch, tables."""
    ax.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
    ax.axis("off")
    _page(ax, 0.08, 1.45, "document", "T tokens")
    _box(ax, 1.55, 1.5, 1.15, 1.2, "prefill", "once, by any\nsupported\nmodel", PLAIN)
    _box(ax, 3.05, 1.5, 1.2, 1.2, "evict", "each layer\nits own policy\nand budget", PLAIN)
    _box(ax, 4.75, 2.35, 1.45, 0.95, "keys", "int8,\nscale a channel", KEY)
    _box(ax, 4.75, 0.9, 1.45, 0.95, "values", "rotate, 3-bit codes,\nfp16 norms", VALUE)
    _cylinder(
        ax, 6.75, 1.15, 1.3, 1.9, "one pool", "packed, frozen,\nsaved to disk,\nread in place"
    )
    for row, name in enumerate(AGENTS):
        bottom = 2.79 - 1.0 * row
        _box(ax, 8.6, bottom, 0.95, 0.62, name, "own suffix", PLAIN)
        _arrow(ax, (8.08, 2.1), (8.58, bottom + 0.31))
        _arrow(ax, (9.57, bottom + 0.31), (9.97, 2.1))
    ax.text(9.075, 1.6, "⋮", ha="center", va="center", color=QUIET, fontsize=12)
    _box(ax, 10.0, 1.5, 0.9, 1.2, "metrics", "tables,\nfigures", PLAIN)
    for start, end in (((1.12, 2.1), (1.52, 2.1)), ((2.72, 2.1), (3.07, 2.1))):
        _arrow(ax, start, end)
    _arrow(ax, (4.28, 2.2), (4.72, 2.8), KEY, "K")
    _arrow(ax, (4.28, 2.0), (4.72, 1.4), VALUE, "V")
    _arrow(ax, (6.22, 2.8), (6.73, 2.35), KEY)
    _arrow(ax, (6.22, 1.4), (6.73, 1.85), VALUE)
    _bracket(ax, 0.08, 8.05, "paid once a document")
    _bracket(ax, 8.6, 9.55, "one batch, N agents")
    note = "attention of every agent = [ pool | own suffix ], merged by log-sum-exp"
    ax.text(WIDTH - 0.1, 0.12, note, ha="right", color=QUIET, fontsize=9, style="italic")


def write(out: Path) -> list[Path]:
    """Draws `<out>/dataflow.svg` and `.png`, the same bytes each time."""
    with house_style():
        figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
        draw(figure.subplots())
        return save(figure, out, "dataflow", ("svg", "png"))


def _box(
    ax: Axes,
    x: float,
    y: float,
    width: float,
    height: float,
    name: str,
    text: str,
    colour: str,
) -> None:
    outline = FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=f"{colour}22",
        edgecolor=colour,
        linewidth=1.3,
    )
    ax.add_patch(outline)
    _label(ax, x + width / 2, y + height, height, name, text)


def _label(ax: Axes, x: float, top: float, height: float, name: str, text: str) -> None:
    lines = text.count("\n") + 1
    middle = top - height / 2
    ax.text(
        x,
        middle + 0.095 * lines,
        name,
        ha="center",
        va="center",
        color=INK,
        fontsize=10,
        weight="bold",
    )
    ax.text(x, middle - 0.11, text, ha="center", va="center", color=INK, fontsize=8)


def _page(ax: Axes, x: float, y: float, name: str, text: str) -> None:
    width, height, fold = 1.02, 1.3, 0.22
    corners = [(x, y), (x + width, y), (x + width, y + height - fold)]
    corners += [(x + width - fold, y + height), (x, y + height)]
    ax.add_patch(Polygon(corners, facecolor="white", edgecolor=PLAIN, linewidth=1.3))
    crease = [(x + width - fold, y + height), (x + width - fold, y + height - fold)]
    ax.add_patch(Polygon([*crease, (x + width, y + height - fold)], facecolor=f"{PLAIN}55"))
    for i in range(4):
        line = Rectangle((x + 0.13, y + 0.92 - 0.09 * i), 0.5 if i < 3 else 0.32, 0.025)
        line.set(facecolor=PLAIN, edgecolor="none")
        ax.add_patch(line)
    _label(ax, x + width / 2, y + 0.62, 0.62, name, text)


def _cylinder(
    ax: Axes, x: float, y: float, width: float, height: float, name: str, text: str
) -> None:
    middle, rim, fill = x + width / 2, 0.34, "#F6F2D8"
    for layer, centre in ((1, y + rim / 2), (3, y + height - rim / 2)):
        end = Ellipse((middle, centre), width, rim, facecolor=fill, edgecolor=POOL, lw=1.5)
        ax.add_patch(end).set_zorder(layer)
    body = Rectangle((x, y + rim / 2), width, height - rim, facecolor=fill)
    ax.add_patch(body).set_zorder(2)
    for side in (x, x + width):
        ax.plot([side, side], [y + rim / 2, y + height - rim / 2], color=POOL, lw=1.5, zorder=2)
    _label(ax, middle, y + height - rim, height - rim, name, text)


def _arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str = QUIET,
    name: str = "",
) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=10,
            color=colour,
            linewidth=1.3,
            shrinkA=0,
            shrinkB=0,
        )
    )
    if name:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        up = 0.16 if end[1] > start[1] else -0.16
        ax.text(x - 0.12, y + up, name, color=colour, ha="center", va="center", weight="bold")


def _bracket(ax: Axes, left: float, right: float, text: str) -> None:
    ax.plot([left, left, right, right], [3.58, 3.66, 3.66, 3.58], color=QUIET, lw=1.0)
    ax.text((left + right) / 2, 3.74, text, ha="center", va="bottom", color=QUIET, fontsize=9)


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "figures"))
