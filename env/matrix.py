"""Run the contract tests on several transformers releases, each in an environment of its own.

Hosted notebooks bring transformers 5.0 and newer, so the library has to agree with all of them.
Usage: python env/matrix.py [version ...]      ("newest" is whatever the package index offers)
"""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS = ("5.0.0", "5.12.1", "newest")
TESTS = ("tests/contract", "tests/hf/test_models.py")
PACKAGES = (
    "accelerate==1.15.0", "beartype==0.23.1", "filelock==4.3.1", "gguf==0.19.0",
    "hypothesis==6.170.17", "jaxtyping==0.3.11", "numpy==2.4.6", "psutil==7.2.2", "pytest==9.2.0",
    "scipy==1.17.1", "torch==2.13.0", "xxhash==4.1.0",
)  # fmt: skip


def python_of(version: str) -> Path:
    """The interpreter of the environment for one release, made and filled where it is missing."""
    home = ROOT / ".venv-matrix" / version
    python = home / "bin" / "python"
    wanted = [f"transformers=={version}" if version != "newest" else "transformers", *PACKAGES]
    ready, stamp = home / ".installed", "\n".join(wanted)
    if version != "newest" and ready.exists() and ready.read_text() == stamp:
        return python
    if not ready.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--upgrade", *wanted], check=True)
    offline = str(ROOT / "env" / "requirements-offline.txt")
    subprocess.run([*pip, "--no-deps", "-r", offline], check=True)
    ready.write_text(stamp)
    return python


def contract(version: str) -> tuple[bool, str]:
    """Whether the contract tests pass on one release, and a line that says so."""
    python = str(python_of(version))
    found = subprocess.run(
        [python, "-c", "import transformers; print(transformers.__version__)"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    tests = [python, "-m", "pytest", "-q", "--tb=short", *TESTS]
    done = subprocess.run(tests, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return done.returncode == 0, f"transformers {found}: {summary}"


def main() -> int:
    """Print one line a release; non-zero when any of them failed."""
    results = []
    for version in sys.argv[1:] or VERSIONS:
        passed, line = contract(version)
        print(line, flush=True)
        results.append(passed)
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
