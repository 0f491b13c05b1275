"""What a notebook may be given: its parameters, their types, and errors of one line."""

from polykv_lib.study.params.checked import (
    ParameterError,
    all_names,
    from_namespace,
    refuse_unknown,
    schema_of,
    validate,
)
from polykv_lib.study.params.schemas import NOTEBOOKS
from polykv_lib.study.params.types import ExperimentParameters, Parameters, near

__all__ = [
    "NOTEBOOKS",
    "ExperimentParameters",
    "ParameterError",
    "Parameters",
    "all_names",
    "from_namespace",
    "near",
    "refuse_unknown",
    "schema_of",
    "validate",
]
