"""A few texts -> a plan: what evicting or storing each layer changes, and what is best of it."""

from polykv_lib.hf.calibration.calibrating import FRACTIONS, calibrate, measure, points_for
from polykv_lib.hf.calibration.joint import calibrate_joint
from polykv_lib.hf.calibration.stored_alone import codec_kl, kl_of_each, read_back
from polykv_lib.hf.calibration.suffix import logits_from, tail_states
from polykv_lib.hf.calibration.validation import evaluate_plans

__all__ = [
    "FRACTIONS",
    "calibrate",
    "calibrate_joint",
    "codec_kl",
    "evaluate_plans",
    "kl_of_each",
    "logits_from",
    "measure",
    "points_for",
    "read_back",
    "tail_states",
]
