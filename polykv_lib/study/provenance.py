"""What a number was made with: code, library versions, machine, time."""

import importlib.metadata
import os
import platform as host
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import polykv_lib
from polykv_lib.study import platform

SOURCES = ("polykv_lib", "notebooks", "env", "pyproject.toml", "environment.yml")
PACKAGES = ("torch", "transformers", "datasets", "bert-score", "numpy", "papermill")


def describe() -> dict[str, Any]:
    """Code and machine as strict JSON; importing none of the packages it reports.

    The dtype, attention and model really used are known to the experiment alone, which adds them.
    """
    return {
        "library": polykv_lib.__version__,
        "git": git_state(platform.repository()),
        "python": host.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
        "platform": platform.kind(),
        "image": _first_line(Path("/etc/build_date")),
        "os": f"{host.system()} {host.release()}",
        "cpu": cpu_model(),
        "cpu_lacks_avx512": platform.lacks_avx512(),
        "cpu_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [
            {
                "name": gpu.name,
                "capability": "{}.{}".format(*gpu.capability),
                "memory_mib": gpu.memory_mib,
            }
            for gpu in platform.gpus()
        ],
    }


def from_torch() -> dict[str, Any]:
    """Threads, peak memory and GPU architectures of torch; empty if torch was not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    facts: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    if torch.cuda.is_available():
        facts["gpu_arch_list"] = torch.cuda.get_arch_list()
        facts["gpu_peak_bytes"] = torch.cuda.max_memory_allocated()
    return facts


def installed(package: str) -> str | None:
    """An installed package's version, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_state(root: Path | None) -> dict[str, Any] | None:
    """Commit, and whether tracked files that can change a result differ from it.

    Those are `SOURCES`; stored results, figures and pages are what runs write. None where there is
    no git history.
    """
    if root is None or not (commit := _git(root, "rev-parse", "HEAD")):
        return None
    changed = _git(root, "status", "--porcelain", "-uno", "--", *SOURCES)
    return {"commit": commit, "dirty": bool(changed)}


def git_remote(root: Path) -> str | None:
    """Owner and name of the origin, as "owner/name", if it is on GitHub; else None."""
    url = _git(root, "remote", "get-url", "origin")
    _, found, path = url.replace(":", "/").partition("github.com/")
    return path.removesuffix(".git") if found else None


def git_branch(root: Path) -> str | None:
    """The branch that is checked out; None on a detached commit or without git."""
    return _git(root, "branch", "--show-current") or None


def cpu_model() -> str:
    """The processor's name as the system reports it."""
    return platform.cpu_field("model name") or host.processor() or host.machine()


def now() -> str:
    """The time in UTC to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:
        return ""


def _first_line(path: Path) -> str | None:
    return path.read_text().partition("\n")[0] if path.is_file() else None
