"""A process of its own that reads saved pools: what its private memory grows by, one line a pool.

`python -m polykv_lib.study.experiments.speed.opening_reader POOL ...` prints a line and waits for
one before it starts, after it has read a pool, and after it has weighed itself. So several such
processes hold the same file at once: a page that only one of them maps would count as private.
"""

import gc
import sys

import torch

from polykv_lib.attend import SharedLayer
from polykv_lib.metrics.memory import private_bytes
from polykv_lib.pool import SharedKVPool, load


def main(paths: list[str]) -> None:
    """Open each pool and read all of it, as one decode step of one agent does."""
    torch.set_num_threads(1)
    _meet("started")
    for path in paths:
        before = private_bytes() or 0
        pool = load(path)
        read(pool)
        _meet("read")
        _meet(str((private_bytes() or 0) - before))
        del pool
        gc.collect()


def read(pool: SharedKVPool) -> None:
    """The attention of one new token in every layer, from a random query for each head."""
    shape = pool.geometry
    q = torch.randn(1, shape.n_q_heads, 1, shape.head_dim)
    for pieces in pool.layers:
        SharedLayer(pieces, shape.n_kv_heads).attend(q, shape.head_dim**-0.5)


def _meet(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1:])
