"""`polykv kaggle`: take points of a grid to Kaggle."""

from pathlib import Path
from typing import Annotated

import typer

from polykv_lib.study.commands.console import checkout, errors_in_one_line

app = typer.Typer(help="Take points of a grid to Kaggle's T4s.", no_args_is_help=True)
MODEL_SOURCE = "owner/model/framework/variation/version"


@app.callback()
def kaggle() -> None:
    """Take points of a grid to Kaggle's T4s."""


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    notebook: Annotated[
        list[str] | None, typer.Option(help="A notebook (02) or an experiment (ppl_inversion).")
    ] = None,
    point: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="A point, by its key as `run --dry-run` lists it."),
    ] = None,
    profile: Annotated[str, typer.Option(help="The grid to take points from.")] = "t4",
    owner: Annotated[
        str, typer.Option(help="Kaggle account; default: the owner of the git remote.")
    ] = "",
    internet: Annotated[
        bool, typer.Option(help="Without: all wheels go along, and the model is attached.")
    ] = True,
    model_source: Annotated[
        list[str] | None, typer.Option(metavar=MODEL_SOURCE, help="A model on Kaggle to attach.")
    ] = None,
    earlier: Annotated[
        list[str] | None,
        typer.Option(metavar="OWNER/SLUG", help="A kernel whose stored results are read."),
    ] = None,
) -> None:
    """Writes a folder a point for `kaggle kernels push`, and the library's wheel as a dataset."""
    from polykv_lib.study import grid as grids  # here, because papermill is slow to import
    from polykv_lib.study import kaggle as exported

    with errors_in_one_line():
        root = checkout()
        grid = grids.load_grid(root / "env" / "grids" / f"{profile}.yaml")
        points = grids.expand(grid, root / "notebooks", profile, only=notebook or [])
        options = exported.Options(
            owner=owner or exported.owner_of(root),
            internet=internet,
            models=tuple(model_source or ()),
            kernels=tuple(earlier or ()),
        )
        for line in exported.export(
            folder, exported.pick(points, point or [], profile), root, options
        ):
            typer.echo(line)
