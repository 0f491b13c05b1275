"""What a saved pool costs to open: milliseconds, and private memory of processes that share it.

The file is in the page cache. Opening maps it and checks, by how much is given to it, the file's
own checksum, the model's fingerprint and the tokenizer's. The tokenizer's is kept once computed, so
the first opening of a process with one takes as long as that besides; as every first round, it is
not counted.

Private memory is what /proc/self/smaps_rollup names Private_Clean and Private_Dirty: pages that no
other process maps. `PROCESSES` processes open the same file and read all of it, the attention of
one decode step in every layer; each weighs itself while all hold the file. Before, they do the same
with a pool of `FEW_TOKENS` tokens. `private_bytes` is what both add, code and scratch included;
`document_bytes` what the document adds to that.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from polykv_lib import hf
from polykv_lib.metrics.intervals import median_interval
from polykv_lib.metrics.memory import private_bytes
from polykv_lib.pool import SharedKVPool, file, load
from polykv_lib.study.experiments.common import row
from polykv_lib.study.experiments.speed import opening_reader
from polykv_lib.study.experiments.speed.timing import interleaved_ms
from polykv_lib.study.record import Row

PROCESSES: Final = 4
FEW_TOKENS: Final = 8
READER: Final = [sys.executable, "-m", opening_reader.__name__]


def opening_rows(
    model: Any,
    tokenizer: Any,
    pools: Sequence[SharedKVPool],
    few: SharedKVPool,
    rounds: int,
    dims: Mapping[str, Any],
) -> Iterator[Row]:
    """Time of opening each pool, ms, and bytes that it adds to a process, where Linux counts them.

    `few` is the pool of a few tokens that every process reads first.
    """
    with TemporaryDirectory() as folder:
        paths = [pool.save(Path(folder) / str(i)) for i, pool in enumerate([few, *pools])]
        for path, pool in zip(paths[1:], pools, strict=True):
            at = {**dims, "context_tokens": pool.n_tokens}
            calls: dict[str, Callable[[], Any]] = {
                "none": partial(file.mapped, path),
                "file": partial(load, path),
                "file, model": partial(hf.load_pool, path, model),
                "file, model, tokenizer": partial(hf.load_pool, path, model, tokenizer),
            }
            for checks, times_ms in interleaved_ms(calls, rounds, model.device).items():
                ms = median_interval(times_ms)
                yield row("opening", "open_ms", ms, "ms", at | {"checks": checks})
        if private_bytes() is None:
            return
        start, *added = added_bytes(paths)
        for pool, own in zip(pools, added, strict=True):
            at = {**dims, "context_tokens": pool.n_tokens}
            both = [one + other for one, other in zip(start, own, strict=True)]
            yield row("opening", "private_bytes", median_interval(both), "B", at)
            yield row("opening", "document_bytes", median_interval(own), "B", at)


def added_bytes(paths: Sequence[Path]) -> list[list[float]]:
    """Private bytes that reading each pool, one after another, adds to each of the processes.

    Raises:
        RuntimeError: a process ended before it had read them.
    """
    with ExitStack() as stack:
        # A reader finds the library where this process does, and not its working folder's files.
        found = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        readers = [
            stack.enter_context(
                subprocess.Popen(
                    [*READER, *map(str, paths)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | found,
                )
            )
            for _ in range(PROCESSES)
        ]
        for reader in readers:
            stack.callback(reader.kill)
        _meet(readers)
        added = []
        for _ in paths:
            _meet(readers)
            added.append([float(line) for line in _meet(readers)])
        return added


def _meet(readers: Sequence["subprocess.Popen[str]"]) -> list[str]:
    """A line of each reader; then all go on."""
    lines = []
    for reader in readers:
        assert reader.stdout is not None
        lines.append(reader.stdout.readline())
    if not all(lines):
        raise RuntimeError("a process that should read a saved pool ended; its error stands above.")
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
    return lines
