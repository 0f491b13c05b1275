"""The console command `polykv`: run the study, write tables and figures, examine the machine."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from polykv_lib.study.commands import bench, kaggle
from polykv_lib.study.commands.console import checkout, errors_in_one_line
from polykv_lib.study.estimate import machine_of
from polykv_lib.study.params import ParameterError, Parameters, near, validate
from polykv_lib.study.platform import Places, PlatformError, check_writable, repository
from polykv_lib.study.store import collect

if TYPE_CHECKING:
    from polykv_lib.study.grid import Point
    from polykv_lib.study.run import Done

app = typer.Typer(
    help="One compressed KV cache of a document, read by many agents: the study.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(kaggle.app, name="kaggle")
app.command()(bench.bench)

PROFILES = (
    "smoke: every notebook on a handful of tokens, about two minutes on one core; "
    "offline: the study without 06 to 08, about 26 minutes on two CPU cores; "
    "offline-full: all of it, more articles and agents, about nine hours; "
    "t4: published models and sizes, about five hours on two T4s (estimate); "
    "t4-8b: the eviction paper's models, some days of two T4s in points of at most seven hours"
)
OutDir = Annotated[str, typer.Option("--out", help="Where everything goes; default: the checkout.")]
Profile = Annotated[str, typer.Option(help="Only this profile's results; default: all but smoke.")]


@app.command()
def run(
    profile: Annotated[str, typer.Option(help=PROFILES)] = "offline",
    only: Annotated[
        list[str] | None, typer.Option(help="A notebook (02) or an experiment (ppl_inversion).")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Wins over the grid.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Compute stored points again.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List points, their keys, time and memory; run none.")
    ] = False,
    dask: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Run on the workers of this Dask scheduler.")
    ] = "",
    out: OutDir = "",
) -> None:
    """Runs each missing point of a profile's grid in a fresh kernel; exit code 1 if one failed."""
    from polykv_lib.study import grid as grids  # here, because papermill is slow to import
    from polykv_lib.study import run as runner

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with errors_in_one_line():
        root = checkout()
        overrides = _assignments(set_ or [])
        overrides |= {"FORCE": True} if force else {}
        overrides |= {"OUT_DIR": str(Path(out).resolve())} if out else {}
        check_writable(Places.at(str(overrides.get("OUT_DIR", ""))).results)
        points = grids.expand(
            grids.load_grid(root / "env" / "grids" / f"{profile}.yaml"),
            root / "notebooks",
            profile,
            only=only or [],
            overrides=overrides,
        )
    if dry_run:
        for line in runner.listing(points, machine_of(profile)):
            typer.echo(line)
        return
    with errors_in_one_line():
        done = _on_dask(dask, points) if dask else runner.run(points, typer.echo)
    typer.echo(runner.summary(done))
    if any(point.status == "failed" for point in done):
        raise typer.Exit(1)


@app.command()
def tables(
    profile: Profile = "",
    out: OutDir = "",
    readme: Annotated[
        Path | None, typer.Option(help="Also refresh the results table between its markers.")
    ] = None,
) -> None:
    """Writes every table, ours and the papers', from stored results; needs no model and no GPU."""
    from polykv_lib.study import tables as tabulated

    with errors_in_one_line():
        chosen = _stored(profile, out)
        results, papers, target = chosen.results, chosen.places.papers, chosen.figures / "tables"
        check_writable(target)
        if readme:
            _fill(readme, results)
        tabulated.write_all(results, papers, target)
        typer.echo(tabulated.summary(results, papers, target))


@app.command()
def figures(profile: Profile = "", out: OutDir = "") -> None:
    """Draws every figure from stored results; needs no model and no GPU."""
    from polykv_lib.study import figures as drawn

    with errors_in_one_line():
        chosen = _stored(profile, out)
        check_writable(chosen.figures)
        for file in drawn.write_all(chosen.results, chosen.figures):
            typer.echo(os.path.relpath(file))


@app.command()
def badges() -> None:
    """Writes Colab and Kaggle badges into notebooks and README, by the git remote; none without."""
    from polykv_lib.study.index import write_badges

    with errors_in_one_line():
        try:
            typer.echo(write_badges(checkout()))
        except (OSError, ValueError) as error:
            _stop(str(error))


@app.command()
def doctor(out: OutDir = "") -> None:
    """Shows what is here and what is missing; exit code 1 if the study cannot run."""
    from polykv_lib.study.doctor import checks

    found = list(checks(out))
    for check in found:
        advice = f" -> {check.advice}" if check.advice else ""
        typer.echo(f"{check.status:4}  {check.what}: {check.found}{advice}")
    if any(check.status == "FAIL" for check in found):
        raise typer.Exit(1)


def _on_dask(address: str, points: "Sequence[Point]") -> "list[Done]":
    try:
        from polykv_lib.study import cluster
    except ModuleNotFoundError as error:
        raise PlatformError(f"--dask needs {error.name}: pip install 'polykv-lib[dask]'") from None
    return cluster.run_on(address, points, typer.echo)


def _stored(profile: str, out: str) -> Parameters:
    """Where a profile's results are read and shown, as for the notebooks that show them.

    Raises:
        ParameterError: neither a grid nor a folder of results has this name.
        typer.Exit: there are no results to show; the code is 1.
    """
    root, results = repository(), Places.at(out).results
    grids = (root / "env" / "grids").glob("*.yaml") if root else []
    folders = (f for f in results.glob("*") if f.is_dir())
    known = sorted({file.stem for file in grids} | {folder.name for folder in folders})
    if profile and profile not in known:
        raise ParameterError(
            f"no profile {profile!r}{near(profile, known)} Known: {', '.join(known) or 'none'}"
        )
    values = {"PROFILE": profile or "auto", "OUT_DIR": out}
    chosen = validate("10_paper_vs_ours", values)
    if not collect(chosen.results):
        again = f"polykv run --profile {profile or 'offline'}" + (f" --out {out}" if out else "")
        _stop(f"no results of a grid in {chosen.results}; run the grid first: {again}")
    return chosen


def _fill(readme: Path, results: Path) -> None:
    from polykv_lib.study.tables import fill_readme

    try:
        fill_readme(readme, collect(results))
    except OSError as error:
        _stop(f"cannot fill {readme}: {error.strerror}")
    except ValueError as error:
        _stop(str(error))


def _stop(said: str) -> NoReturn:
    typer.echo(f"polykv: {said}", err=True)
    raise typer.Exit(1)


def _assignments(texts: list[str]) -> dict[str, str | bool]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not equals:
            raise ParameterError(f"--set {name}: expected NAME=VALUE, such as --set N_DOCS=4")
    return {name.strip(): value for name, _, value in pairs}


if __name__ == "__main__":
    app()
