"""Name -> model: where it lies, how it is loaded and placed, what it weighs; fingerprints."""

from polykv_lib.hf.models.export import export_model
from polykv_lib.hf.models.footprint import Footprint, footprint, geometry_of
from polykv_lib.hf.models.loading import load_model, model_fingerprint, tokenizer_fingerprint

__all__ = [
    "Footprint",
    "export_model",
    "footprint",
    "geometry_of",
    "load_model",
    "model_fingerprint",
    "tokenizer_fingerprint",
]
