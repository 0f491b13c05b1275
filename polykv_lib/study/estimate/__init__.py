"""What a point will take, before it runs: time and memory, from its parameters and shapes."""

from polykv_lib.study.estimate.expected import (
    TWO_T4,
    DoesNotFit,
    Estimate,
    Machine,
    estimate,
    machine_of,
    this_machine,
)

__all__ = [
    "TWO_T4",
    "DoesNotFit",
    "Estimate",
    "Machine",
    "estimate",
    "machine_of",
    "this_machine",
]
