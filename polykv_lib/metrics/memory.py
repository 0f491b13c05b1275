"""Bytes: of dense caches from shapes, the peak that work really reaches, and what is private.

Sizes of a pool are counted from its own tensors (`pool.nbytes`). 1 GB is 1e9 bytes.
"""

import ctypes
import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from polykv_lib.kv import Geometry

_RESET_PEAK: Final = "5"  # what /proc/self/clear_refs takes to forget the highest resident size


def dense_bytes(
    geometry: Geometry, n_tokens: int, *, n_copies: int = 1, element_bytes: int = 2
) -> int:
    """Bytes of uncompressed keys and values: copies x tokens x elements a token x element bytes."""
    return n_copies * n_tokens * geometry.elements_per_token * element_bytes


@dataclass(kw_only=True)
class Peak:
    """Highest memory reached inside a `peak_memory` block; complete once the block has ended.

    `source` says what was read: "cuda allocator" (tensor bytes on the device), "VmHWM" (resident
    set of this process, reset at the start of the block) or "ru_maxrss" (the same but never reset:
    it can only miss growth below an earlier peak).
    """

    source: str
    start_bytes: int
    end_bytes: int | None = None

    @property
    def added_bytes(self) -> int:
        """Peak above the start of the block.

        Raises:
            RuntimeError: The block has not ended.
        """
        if self.end_bytes is None:
            raise RuntimeError("the peak is known when the peak_memory block ends; read it after.")
        return max(0, self.end_bytes - self.start_bytes)


@contextmanager
def peak_memory(device: torch.device | str = "cpu") -> Iterator[Peak]:
    """Measures the peak memory of the block: the CUDA allocator's on a GPU, else the process's.

    Freed memory is handed back first, so that the block can not hide in it.
    """
    gc.collect()
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        peak = Peak(source="cuda allocator", start_bytes=torch.cuda.memory_allocated(device))
        yield peak
        torch.cuda.synchronize(device)
        peak.end_bytes = torch.cuda.max_memory_allocated(device)
        return
    _return_freed_memory()
    if _reset_resident_peak():
        peak = Peak(source="VmHWM", start_bytes=_resident_peak())
        yield peak
        peak.end_bytes = _resident_peak()
    else:
        peak = Peak(source="ru_maxrss", start_bytes=_lifetime_peak())
        yield peak
        peak.end_bytes = _lifetime_peak()


def private_bytes() -> int | None:
    """Resident bytes that no other process maps, clean and dirty; None where Linux does not tell.

    Freed memory is handed back first. A mapped file's pages are private to its only reader.
    """
    gc.collect()
    _return_freed_memory()
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:  # not Linux, or a sandbox that forbids it
        return None
    kib = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(kib)


def _return_freed_memory() -> None:
    """Give blocks that the C library keeps after `free` back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _reset_resident_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    except OSError:  # not Linux, or a sandbox that forbids it
        return False
    return True


def _resident_peak() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line; use a Linux kernel with procfs.")


def _lifetime_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
