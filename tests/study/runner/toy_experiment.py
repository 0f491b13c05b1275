"""An experiment that counts, or fails in a chosen way; imported by the tests and by their kernels."""

import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from polykv_lib.study import params
from polykv_lib.study.params import types
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome


class Toy(types.ExperimentParameters):
    experiment = "toy"

    N: types.Count
    FAIL: types.Text


class OutOfMemoryError(RuntimeError):
    pass


def count(i: int) -> int:
    return i


def run(resolved: Mapping[str, Any], say: Callable[[str], None]) -> Outcome:
    say(f"counting to {resolved['N']}")
    match resolved["FAIL"]:
        case "error":
            raise ValueError("it broke\non two lines")
        case "oom":
            raise OutOfMemoryError("Tried to allocate 20.00 GiB")
        case "die":
            os._exit(9)
        case "quit":
            sys.exit(0)
    parts = [part(f"{i}", count, i) for i in range(resolved["N"])]
    row = {
        "table": "toy",
        "metric": "n",
        "value": len(parts),
        "unit": "1",
        "n": 1,
        "dims": {"n_agents": resolved["N"]},
    }
    return Outcome([row], [{"name": "é", "values": [1.5, None]}], {"dtype": "float32"})


def install() -> None:
    """Makes the experiment known to the library in this process."""
    module = ModuleType("polykv_lib.study.experiments.toy")
    module.run = run
    sys.modules[module.__name__] = module
    params.NOTEBOOKS["05_toy"] = Toy
