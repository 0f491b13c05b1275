"""Keys or values -> codes: each codec is a linear map, a scale and a set of levels."""

from polykv_lib.quantize.affine import Affine
from polykv_lib.quantize.base import FullPrecision, Quantized, Quantizer, check_codec
from polykv_lib.quantize.harmonic import HarmonicTurboQuant
from polykv_lib.quantize.int8 import Int8
from polykv_lib.quantize.turboquant import TurboQuant

__all__ = [
    "Affine",
    "FullPrecision",
    "HarmonicTurboQuant",
    "Int8",
    "Quantized",
    "Quantizer",
    "TurboQuant",
    "check_codec",
]
