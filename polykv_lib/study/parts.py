"""What a point has computed of itself so far: an interruption costs one part, not hours.

A part is kept in a file of its own until its point is stored. It is taken up again by the same
point alone, by the same code and libraries on the same kind of device: anything else computes it
anew. Experiments that time something keep no parts. Parts are pickled: attach no stranger's output.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from polykv_lib import sources
from polykv_lib.study import provenance
from polykv_lib.study.store import write_atomically

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(kw_only=True)
class Parts:
    """Files `<name>.part` in `write`, which is made when needed, and in each folder of `read`.

    The folder's name says what the parts were made with, its parent's of which point they are.
    """

    write: Path
    read: Sequence[Path] = ()
    resumed: list[str] = field(default_factory=list)  # names of parts that were found

    @property
    def names(self) -> set[str]:
        """Of the parts that are there."""
        return {file.stem for folder in (self.write, *self.read) for file in folder.glob("*.part")}

    def provenance(self) -> dict[str, int]:
        """How many parts this run did not compute: its time is not that of the whole point."""
        return {"parts_of_earlier_runs": len(self.resumed)}

    def of(self, name: str, compute: Callable[[], T]) -> T:
        """The part of this name: the kept one, or computed now and kept."""
        import torch  # here, because the study is imported without it

        for folder in (self.write, *self.read):
            file = folder / f"{name}.part"
            if not file.is_file():
                continue
            try:
                part: T = torch.load(file, weights_only=False)
            except Exception as error:  # whatever a broken file makes of unpickling
                log.warning("%s is broken and computed again (%s)", file, error)
                continue
            self.resumed.append(name)
            return part
        part = compute()
        content = BytesIO()
        torch.save(part, content)
        write_atomically(self.write / f"{name}.part", content.getvalue())
        return part

    def forget(self) -> None:
        """Drops the point's parts, those of other code and devices too."""
        shutil.rmtree(self.write.parent, ignore_errors=True)


_PARTS: ContextVar[Parts | None] = ContextVar("parts", default=None)


@contextmanager
def keeping(parts: Parts) -> Iterator[None]:
    """Inside, `part` keeps what it computes."""
    token = _PARTS.set(parts)
    try:
        yield
    finally:
        _PARTS.reset(token)


def part(name: str, compute: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """`compute(*args, **kwargs)`, kept under a name that is the point's own; outside, not kept."""
    parts = _PARTS.get()
    if parts is None:
        return compute(*args, **kwargs)
    return parts.of(name, lambda: compute(*args, **kwargs))


@cache
def made_with() -> str:
    """16 hex digits that change with this library's code, the packages below it and the device."""
    import torch

    facts = provenance.describe()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    made = [sources.digest(), facts["packages"], gpus or facts["cpu"]]
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]
