"""Environments of the peers that the benchmark stands beside, each with its own packages.

Usage: python env/peers.py [peer ...]      prints {peer: interpreter, or why there is none} as JSON
"""

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".venv-peers"
OURS = "polykv-lib"  # runs in the environment that asks
PEERS = (OURS, *sorted(file.stem for file in (ROOT / "env" / "peers").glob("*.txt")))


def python_of(peer: str) -> Path:
    """The interpreter of a peer's environment, made and filled where it is missing.

    Raises:
        subprocess.CalledProcessError: a package does not install; its output says which and why.
    """
    if peer == OURS:
        return Path(sys.executable)
    wanted = ROOT / "env" / "peers" / f"{peer}.txt"
    home, python = HOME / peer, HOME / peer / "bin" / "python"
    ready = home / ".installed"
    if ready.exists() and ready.read_text() == wanted.read_text():
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "-r", str(wanted)], check=True, capture_output=True, text=True)
    ready.write_text(wanted.read_text())
    return python


def found(peer: str) -> str:
    """The interpreter's path, or the last words of an installation that failed."""
    try:
        return str(python_of(peer))
    except subprocess.CalledProcessError as error:
        return "not installed: " + (error.stderr.strip().splitlines() or ["no output"])[-1]


if __name__ == "__main__":
    print(json.dumps({peer: found(peer) for peer in sys.argv[1:] or PEERS}))
