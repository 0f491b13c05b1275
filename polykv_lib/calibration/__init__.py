"""What was measured over a few texts -> a plan; `hf.calibration` makes the passes over a model."""

from polykv_lib.calibration.decoding import decoded_output
from polykv_lib.calibration.items import EncodedItem
from polykv_lib.calibration.joint import joint
from polykv_lib.calibration.measured import Measured, Measurements, Phase, from_json, to_json
from polykv_lib.calibration.recompute import compare, tail_output
from polykv_lib.calibration.solve import Calibration, Recipe, both_phases, signals, solve
from polykv_lib.calibration.validate import (
    PlanScore,
    by_family,
    choose,
    macro_kl,
    regrets,
    shuffled,
)

__all__ = [
    "Calibration",
    "EncodedItem",
    "Measured",
    "Measurements",
    "Phase",
    "PlanScore",
    "Recipe",
    "both_phases",
    "by_family",
    "choose",
    "compare",
    "decoded_output",
    "from_json",
    "joint",
    "macro_kl",
    "regrets",
    "shuffled",
    "signals",
    "solve",
    "tail_output",
    "to_json",
]
