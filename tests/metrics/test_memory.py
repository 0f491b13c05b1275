from pathlib import Path

import pytest
import torch

from polykv_lib.kv import Geometry
from polykv_lib.metrics import memory
from polykv_lib.metrics.memory import dense_bytes, peak_memory

LLAMA_3_8B = Geometry(n_layers=32, n_q_heads=32, n_kv_heads=8, head_dim=128)


def test_dense_bytes_reproduce_the_published_gigabytes() -> None:
    assert dense_bytes(LLAMA_3_8B, 1) == 131_072
    # 19.798 GB is fifteen float32 copies of 5,035 tokens, and 0.505 GB three bf16 copies of 1,285.
    assert dense_bytes(LLAMA_3_8B, 5_035, n_copies=15, element_bytes=4) / 1e9 == pytest.approx(
        19.798, abs=5e-4
    )
    assert dense_bytes(LLAMA_3_8B, 1_285, n_copies=3) / 1e9 == pytest.approx(0.505, abs=5e-4)


def test_peak_sees_memory_that_is_gone_at_the_end_and_forgets_earlier_peaks() -> None:
    big = torch.ones(30_000_000)
    del big
    with peak_memory() as peak:
        block = torch.ones(10_000_000)
        del block
    assert peak.source == "VmHWM"
    assert peak.added_bytes == pytest.approx(40e6, rel=0.1)


def test_freed_small_blocks_do_not_hide_a_peak() -> None:
    blocks = [torch.ones(16_000) for _ in range(1_251)]  # too small for pages of their own
    last = blocks.pop()
    del blocks  # the C library keeps them, since `last` lies above them on its heap
    with peak_memory() as peak:
        again = [torch.ones(16_000) for _ in range(1_250)]
        del again
    assert last.sum() == 16_000
    assert peak.added_bytes == pytest.approx(80e6, rel=0.2)


def test_without_procfs_the_lifetime_peak_is_read_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(self: Path, text: str) -> int:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", forbidden)
    with peak_memory() as peak:
        pass
    assert peak.source == "ru_maxrss"
    assert peak.start_bytes == memory._lifetime_peak()
    assert peak.added_bytes == 0


def test_a_peak_is_not_read_before_the_end() -> None:
    with (
        peak_memory() as peak,
        pytest.raises(RuntimeError, match="when the peak_memory block ends"),
    ):
        _ = peak.added_bytes


@pytest.mark.gpu
def test_peak_on_a_gpu_is_the_allocators() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with peak_memory("cuda") as peak:
        block = torch.ones(10_000_000, device="cuda")
        del block
    assert peak.source == "cuda allocator"
    assert peak.added_bytes == pytest.approx(40e6, rel=0.02)
