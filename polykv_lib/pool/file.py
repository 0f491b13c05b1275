"""A pool on disk: one safetensors file whose metadata holds a JSON header and a checksum.

Stored tensors are compute-ready, so an opened pool is the mapped file itself and processes share
it.
"""

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from polykv_lib.pool.pieces import PoolError

SCHEMA: Final = 1


def write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and header to `path`, whole or not at all."""
    at_rest = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    described = {"schema": SCHEMA, **header}
    full_header = {**described, "checksum": _checksum(at_rest, described)}
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    except OSError as error:
        raise PoolError(
            f"can not write {path}: {error.strerror}. Choose a file name in a writable folder."
        ) from error
    os.close(handle)
    try:
        save_file(at_rest, part, metadata={"polykv": json.dumps(full_header)})
        Path(part).replace(path)
    finally:
        Path(part).unlink(missing_ok=True)


def read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and memory-mapped tensors of a pool file, every byte checked.

    Raises:
        PoolError: missing, truncated, altered, not a pool, or of a newer schema.
    """
    header, tensors, checksum = mapped(path)
    if checksum != _checksum(tensors, header):
        raise PoolError(f"{path} was altered: its checksum does not match. Save the pool again.")
    return header, tensors


def mapped(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Header, memory-mapped tensors and the checksum that they should have; none is read yet.

    Raises:
        PoolError: missing, truncated, not a pool, or of a newer schema.
    """
    if not path.is_file():
        raise PoolError(f"there is no pool at {path}. Write one with pool.save(path).")
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("polykv")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise PoolError(
            f"{path} is truncated or no safetensors file ({error}). Save the pool again."
        ) from error
    if text is None:
        raise PoolError(f"{path} is a safetensors file, but holds no PolyKV pool.")
    try:
        header: dict[str, Any] = json.loads(text)
        schema, checksum = header["schema"], header.pop("checksum")
    except (ValueError, KeyError) as error:
        raise PoolError(
            f"the header of {path} is damaged ({error}). Save the pool again."
        ) from error
    if schema > SCHEMA:
        raise PoolError(
            f"{path} has schema {schema}, this version reads up to {SCHEMA}. "
            "Upgrade polykv-lib, or save the pool again with this version."
        )
    return header, tensors, checksum


def _checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    digest = xxhash.xxh3_128(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        if tensors[name].numel():
            digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
