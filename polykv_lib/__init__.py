"""Shared, compressed KV caches for many agents reading one document.

Public names load on first use, so that tables and figures never pay for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polykv_lib.evict import Plan
    from polykv_lib.hf import (
        ask,
        build_pool,
        calibrate,
        calibrate_joint,
        document_ids,
        load_model,
        load_pool,
        prefill,
        prepare,
    )
    from polykv_lib.pool import SharedKVPool, Tiered
    from polykv_lib.quantize import Affine, FullPrecision, HarmonicTurboQuant, Int8, TurboQuant

__version__ = "0.1.0"

_HOMES = {
    "Affine": "quantize",
    "FullPrecision": "quantize",
    "HarmonicTurboQuant": "quantize",
    "Int8": "quantize",
    "Plan": "evict",
    "TurboQuant": "quantize",
    "SharedKVPool": "pool",
    "Tiered": "pool",
    "ask": "hf",
    "build_pool": "hf",
    "calibrate": "hf",
    "calibrate_joint": "hf",
    "document_ids": "hf",
    "load_model": "hf",
    "load_pool": "hf",
    "prefill": "hf",
    "prepare": "hf",
}

__all__ = [
    "Affine",
    "FullPrecision",
    "HarmonicTurboQuant",
    "Int8",
    "Plan",
    "SharedKVPool",
    "Tiered",
    "TurboQuant",
    "ask",
    "build_pool",
    "calibrate",
    "calibrate_joint",
    "document_ids",
    "load_model",
    "load_pool",
    "prefill",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
