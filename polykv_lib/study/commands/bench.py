"""`polykv bench`: the throughput experiment of a profile, and its peers in their environments."""

from typing import Annotated

import typer

from polykv_lib.study.commands.console import checkout, errors_in_one_line
from polykv_lib.study.platform import Places, PlatformError, check_writable
from polykv_lib.study.render import markdown
from polykv_lib.study.store import SCRATCH_PROFILE, Store, collect, key_of

TABLES = ("checks", "speedup", "throughput", "first_token", "prefill", "encode", "bandwidth")


def bench(
    profile: Annotated[
        str, typer.Option(help="Grid and results folder; bench-gpu: the benchmark alone on a GPU.")
    ] = "offline",
    peers: Annotated[
        bool, typer.Option("--peers", help="Other packages instead, each in its own environment.")
    ] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Wins over the grid.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure stored points again.")] = False,
    out: Annotated[str, typer.Option("--out", help="Where everything goes.")] = "",
) -> None:
    """Times and weighs every method on one document, answers checked first; prints the tables."""
    if peers:
        _peers(profile, force, out)
    else:
        from polykv_lib.study.cli import run  # here, because that module imports this one

        run(profile=profile, only=["throughput"], set_=set_, force=force, out=out)
    _show(profile, out, ("peers",) if peers else TABLES)


def _peers(profile: str, force: bool, out: str) -> None:
    from polykv_lib.study import peers

    with errors_in_one_line():
        root, results = checkout(), Places.at(out).results
        check_writable(results)
        point = peers.SMOKE if profile == SCRATCH_PROFILE else peers.Point()
        store = Store(write=results / profile)
        if force or store.get(peers.EXPERIMENT, key_of(peers.EXPERIMENT, point.params)) is None:
            try:
                record = peers.run(point, profile, store, root, typer.echo)
            except RuntimeError as error:
                raise PlatformError(str(error)) from None
            typer.echo(f"not measured: {record.provenance['peers_missing'] or 'none'}")


def _show(profile: str, out: str, names: tuple[str, ...]) -> None:
    from polykv_lib.study.rows import tidy
    from polykv_lib.study.tables.own import OWN, own_table

    numbers = tidy(collect(Places.at(out).results / profile))
    for name in names:
        table = own_table(numbers, OWN[name])
        if len(table):
            typer.echo(f"\n{OWN[name].title}\n\n{markdown(table)}")
