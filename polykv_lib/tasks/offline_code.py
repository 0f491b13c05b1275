"""Code to be continued: source files of the Python standard library that runs the program.

Their text depends on the version of Python, which each item's source names.
"""

import sysconfig
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

from polykv_lib.tasks.base import Maker, Parts, Split
from polykv_lib.tasks.passages import CALIBRATION_EVERY

MIN_LINES: Final = 300
MIN_LINE_CHARS: Final = 12
QUESTION_LINES: Final = 4
_BEGINNINGS: Final = ("return ", "self.", "if ", "elif ", "for ", "raise ", "def ")


@cache
def modules(split: Split) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names and lines of one split's modules, in order of the alphabet.

    Single files of the library's top folder with at least 300 lines; each third one calibrates.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts = ((p.stem, p.read_text("utf-8").split("\n")) for p in sorted(folder.glob("[a-z]*.py")))
    long = [(name, tuple(lines)) for name, lines in texts if len(lines) >= MIN_LINES]
    return tuple(
        module
        for i, module in enumerate(long, 1)
        if (i % CALIBRATION_EVERY == 0) is (split == "calibration")
    )


def next_line(lines: tuple[str, ...], random: Random) -> Maker:
    """The `size` lines before one of code, which is asked; the last four are the question."""
    place = random.choice(
        [
            i
            for i in range(MIN_LINES // 2, len(lines))
            if _is_code(lines[i]) and lines[i - 1].strip()
        ]
    )
    return lambda size: Parts(
        context="Please complete the code given below. \n"
        + "\n".join(lines[max(0, place - size) : place - QUESTION_LINES])
        + "\n",
        question="\n".join(lines[place - QUESTION_LINES : place]) + "\n",
        answers=(lines[place],),
    )


def _is_code(line: str) -> bool:
    bare = line.strip()
    return (
        len(bare) >= MIN_LINE_CHARS
        and bare.startswith(_BEGINNINGS)
        and not any(mark in line for mark in ("`", "#", "//"))
    )
