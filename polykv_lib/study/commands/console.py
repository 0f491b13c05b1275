"""What the console's commands share: the checkout, and errors of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from polykv_lib.study.params import ParameterError
from polykv_lib.study.platform import PlatformError, repository


def checkout() -> Path:
    """The folder with notebooks and grids.

    Raises:
        PlatformError: the library is installed without it.
    """
    root = repository()
    if root is None:
        raise PlatformError(
            "notebooks and grids are not installed with the library; clone the repository and run "
            "`pip install -e .` in it"
        )
    return root


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What a user can mend ends in one line and exit code 2, without a traceback."""
    try:
        yield
    except (ParameterError, PlatformError, FileNotFoundError) as error:
        typer.echo(f"polykv: {error}", err=True)
        raise typer.Exit(2) from None
