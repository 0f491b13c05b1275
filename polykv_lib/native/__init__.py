"""C for what torch does slowly, made on first use by the system's compiler; torch stands in for it.

It needs a CPU with AVX-512, and uses AMX where there is that too. The library lies in the user's
cache folder. POLYKV_NATIVE=0 turns it off.
"""

import ctypes
import hashlib
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

SOURCES: Final = Path(__file__).with_name("source")
FLAGS: Final = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
NEEDED: Final = ("F", "BW", "VL", "VBMI", "VNNI", "BF16")  # of AVX-512
TILES: Final = ("INT8", "BF16")  # of AMX
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def enabled() -> bool:
    """Whether the user lets C be used at all."""
    return os.environ.get("POLYKV_NATIVE") != "0"


@cache
def functions() -> Any:
    """The compiled functions (ctypes.CDLL), or a text that says why there are none."""
    try:
        return ctypes.CDLL(str(_made()))
    except (OSError, subprocess.SubprocessError, RuntimeError, ValueError) as error:
        return str(error)


def instructions() -> str:
    """What the library multiplies by: "AMX" or "AVX-512"."""
    text: bytes = (ctypes.c_char * 8).in_dll(functions(), "polykv_instructions").value
    return text.decode()


def _made() -> Path:
    """The library for these sources, compiler and CPU, made by the first process that asks.

    Raises:
        OSError: no compiler, or a cache folder that can not be written.
        subprocess.SubprocessError: the compiler failed.
        RuntimeError: CPU or compiler lack instructions.
    """
    compiler = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS]
    features = _run([*compiler, "-dM", "-E", "-x", "c", os.devnull])  # and the compiler's version
    if all(f"__AMX_{name}__ " in features for name in TILES) and not _tiles_permitted():
        compiler.append("-DNO_AMX")
    missing = [name for name in NEEDED if f"__AVX512{name}__ " not in features]
    if missing:
        raise RuntimeError(f"CPU or compiler lacks AVX-512 {', '.join(missing)}")
    sources = [file.read_text() for file in sorted(SOURCES.iterdir())]
    made_of = "\n".join((*sources, *compiler, features))
    library = cache_folder() / f"native-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [*compiler, *map(str, sorted(SOURCES.glob("*.c"))), "-o", str(made), "-lm"]
            try:
                _run([*command, "-fopenmp"])
            except subprocess.CalledProcessError:
                _run(command)  # one thread
            made.replace(library)
    return library


def _tiles_permitted() -> bool:
    """Linux's permission to use AMX, which a process asks for once for all its threads."""
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/polykv`, or `~/.cache/polykv`."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "polykv"
