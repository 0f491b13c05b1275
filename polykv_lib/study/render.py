"""Frames as text: Markdown and LaTeX with intervals beside their values and no blank cell."""

from pathlib import Path

import pandas as pd
from tabulate import tabulate

from polykv_lib.study.store import write_atomically

NOTHING = "-"


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table, intervals beside their values, nothing blank."""
    return _render(frame, "github")


def latex(frame: pd.DataFrame) -> str:
    """A frame as a LaTeX `tabular` with booktabs rules, special characters escaped."""
    return _render(frame, "latex_booktabs")


def number(value: object) -> str:
    """A cell as text: four significant digits, thousands marked, a dash where there is nothing."""
    if value is None or value is pd.NA or value != value or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    whole = float(value).is_integer() or abs(value) >= 10_000
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def _render(frame: pd.DataFrame, style: str) -> str:
    shown = {
        str(name): _with_interval(frame, str(name))
        for name in frame.columns
        if not str(name).endswith((" lo", " hi")) or str(name).startswith("95 %")
    }
    return tabulate(shown, headers="keys", tablefmt=style, disable_numparse=True)


def _with_interval(frame: pd.DataFrame, name: str) -> list[str]:
    values = [number(value) for value in frame[name]]
    if f"{name} lo" not in frame:
        return values
    bounds = zip(frame[f"{name} lo"], frame[f"{name} hi"], strict=True)
    return [
        value if lo != lo else f"{value} [{number(lo)}, {number(hi)}]"
        for value, (lo, hi) in zip(values, bounds, strict=True)
    ]


def fill_between(file: Path, begin: str, end: str, content: str) -> None:
    """Replaces what stands between two marker lines of a file.

    Raises:
        OSError: the file cannot be read or written.
        ValueError: a marker is missing, or the end stands before the beginning.
    """
    text = file.read_text(encoding="utf-8")
    if not 0 <= text.find(begin) < text.find(end):
        raise ValueError(f"{file} has no lines {begin} and {end}; the table goes between them.")
    head, tail = text.split(begin)[0], text.split(end)[1]
    write_atomically(file, f"{head}{begin}\n{content}\n{end}{tail}")
