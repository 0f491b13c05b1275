"""The table of contents of the notebooks, with badges where the checkout has a public home."""

import json
from pathlib import Path

import nbformat
from tabulate import tabulate

from polykv_lib.study.provenance import git_branch, git_remote
from polykv_lib.study.render import fill_between
from polykv_lib.study.store import write_atomically

COLAB = "https://colab.research.google.com"
KAGGLE = "https://kaggle.com"
BEGIN, END = "<!-- notebooks:begin -->", "<!-- notebooks:end -->"
BADGE = "[![Open in Colab]"  # how a line of badges begins


def contents(root: Path) -> str:
    """A Markdown table of the notebooks in reading order: title, running time, badges.

    Args:
        root: the checkout; without a GitHub remote there is nothing to open, hence no badges.
    """
    remote, branch = git_remote(root), git_branch(root)
    lines = []
    for file in sorted((root / "notebooks").glob("*.ipynb")):
        title, time = about(file)
        line = {"notebook": f"`{file.name}`", "shows": title, "time, as it opens": time}
        if remote and branch:
            line["open"] = badges(f"{remote}/blob/{branch}/notebooks/{file.name}")
        lines.append(line)
    return tabulate(lines, headers="keys", tablefmt="github")


def about(file: Path) -> tuple[str, str]:
    """A notebook's title and running time, from the `# …` and `Time: …` lines of its first cell."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    lines = "".join(cells[0]["source"]).splitlines()
    times = (line.removeprefix("Time: ") for line in lines if line.startswith("Time: "))
    return lines[0].removeprefix("# "), next(times, "")


def badges(path: str) -> str:
    """Colab and Kaggle links to a file on GitHub, given as `owner/name/blob/branch/path`."""
    return (
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({COLAB}/github/{path}) "
        f"[![Open in Kaggle]({KAGGLE}/static/images/open-in-kaggle.svg)]"
        f"({KAGGLE}/kernels/welcome?src=https://github.com/{path})"
    )


def write_badges(root: Path) -> str:
    """Badges under each notebook's title and in the README's list of notebooks, or none.

    Whether there are any depends on the checkout's GitHub remote alone: without one, badges that
    stand there are taken away.

    Returns:
        One line that says what the files have now.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the README has no place for the list.
    """
    remote, branch = git_remote(root), git_branch(root)
    for file in sorted((root / "notebooks").glob("*.ipynb")):
        book = nbformat.read(file, as_version=4)
        title, *rest = book.cells[0].source.split("\n\n")
        parts = [title, *(part for part in rest if not part.startswith(BADGE))]
        if remote and branch:
            parts.insert(1, badges(f"{remote}/blob/{branch}/notebooks/{file.name}"))
        book.cells[0].source = "\n\n".join(parts)
        write_atomically(file, nbformat.writes(book) + "\n")
    fill_between(root / "README.md", BEGIN, END, contents(root))
    return f"badges open {remote}" if remote and branch else "no GitHub remote, so no badges"
