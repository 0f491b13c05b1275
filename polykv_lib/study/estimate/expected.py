"""Time and memory of a point before it runs, from its parameters and the model's config alone.

Memory: weights, keys and values (document, pool, agents' own), activations of one layer, logits;
spread over the GPUs as `load_model` spreads layers. Time: 2 FLOP a weight and token, attention,
and the weights read once a decoding step. Downloading, loading and compressing are not counted. The
rates of a T4 are assumed; those of a CPU core reproduce the times of the stored offline points
within a factor of two and a half.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

from polykv_lib.study import platform
from polykv_lib.study.estimate.copies import BYTES
from polykv_lib.study.estimate.work import Work, work_of
from polykv_lib.study.params import ExperimentParameters
from polykv_lib.study.platform import PlatformError

if TYPE_CHECKING:
    from polykv_lib.hf import Footprint

GB: Final = 1e9
RESERVED: Final = int(0.9e9)  # of each GPU: the CUDA context and what the allocator cannot use
LAYER_WIDTHS: Final = 8  # hidden-sized tensors alive in one layer: residual, norms, q, k, v, out
CHUNK: Final = 128  # tokens whose logits are held in float32 at once, four times over
STEP_S: Final = 1e-3  # a layer of a decoding step takes at least this, launching its kernels


class DoesNotFit(PlatformError):
    """The point needs more memory than this machine has; the text is the arithmetic."""


class Rates(NamedTuple):
    """What a device sustains, well below its data sheet."""

    flop_s: float
    bytes_s: float
    half_flop_s: float  # in a dtype of two bytes

    def times(self, n: int | float) -> "Rates":
        """Those of n such devices."""
        return Rates(*(n * rate for rate in self))


T4: Final = Rates(20e12, 200e9, 20e12)  # of 65 TFLOP/s in float16 and 320 GB/s
CPU: Final = Rates(80e9, 5e9, 200e9)  # of one core, from the stored offline points
CPU_AVX2: Final = Rates(30e9, 5e9, 30e9)  # of one x86 core without AVX-512, from two of them
MAX_CORES: Final = 4  # more do not help models that small


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Equal GPUs, or a CPU as one device; `rates` are None where nothing is known of its speed."""

    name: str
    n_devices: int
    memory: int  # bytes of one device
    element_bytes: int
    rates: Rates | None
    is_gpu: bool = True
    n_cores: int = 1  # of a CPU, which the rates are of

    @property
    def usable(self) -> int:
        """Bytes of one device that a point may take."""
        return self.memory - RESERVED if self.is_gpu else self.memory

    def __str__(self) -> str:
        return f"{self.n_devices} x {self.name}" if self.is_gpu else self.name


TWO_T4: Final = Machine(
    name="T4", n_devices=2, memory=15_360 * 2**20, element_bytes=2, rates=T4
)  # what Kaggle lends


def this_machine() -> Machine:
    """The GPUs that the driver reports, else this CPU, on which models are in float32."""
    found = platform.gpus()
    if not found:
        core = CPU_AVX2 if platform.lacks_avx512() else CPU
        n_cores = min(MAX_CORES, int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        return Machine(
            name=f"a CPU, {n_cores} cores counted" if n_cores > 1 else "one CPU core",
            n_devices=1,
            memory=psutil.virtual_memory().total,
            element_bytes=4,
            rates=core.times(n_cores),
            is_gpu=False,
            n_cores=n_cores,
        )
    return Machine(
        name=found[0].name,
        n_devices=len(found),
        memory=min(gpu.memory_mib for gpu in found) * 2**20,
        element_bytes=2,
        rates=T4 if found[0].capability == (7, 5) else None,
    )


def machine_of(profile: str) -> Machine:
    """What a profile is planned for: this machine, but two T4s for `t4` where there is no GPU."""
    here = this_machine()
    return TWO_T4 if profile.startswith("t4") and not here.is_gpu else here


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes of a point by what they hold, and its time; None where no rate is known."""

    model: str
    machine: Machine
    weights: int
    cache: int  # keys and values
    activations: int  # on every device
    seconds: float | None

    @property
    def fits(self) -> bool:
        """Whether every device holds its share."""
        from polykv_lib.hf.models.placement import SHARE

        n, usable = self.machine.n_devices, self.machine.usable
        first = 1.0 if n == 1 else min(1.0, SHARE * usable / self.weights)  # filled in order
        held = [first, *[min(first, max(0.0, 1 - i * first)) for i in range(1, n)]]
        shares = [(self.weights + self.cache) * share + self.activations for share in held]
        return sum(held) > 0.999 and max(shares) <= usable

    @property
    def arithmetic(self) -> str:
        """The sum, in GB of 1e9 bytes."""
        n = self.machine.n_devices
        total = self.weights + self.cache + n * self.activations
        times = f"{n} x " if n > 1 else ""
        return (
            f"weights {self.weights / GB:.2f} + keys and values {self.cache / GB:.2f} + "
            f"activations {times}{self.activations / GB:.2f} = {total / GB:.2f} GB, of "
            f"{times}{self.machine.usable / GB:.2f} GB usable on {self.machine}"
        )

    @property
    def time(self) -> str:
        """The time in words."""
        if self.seconds is None:
            return "time unknown on this device"
        minutes = self.seconds / 60
        if minutes < 100:
            return f"about {max(1, round(minutes))} min"
        return f"about {minutes / 60:.1f} h"

    def checked(self) -> str:
        """What the notebook says before the point runs.

        Raises:
            DoesNotFit: it cannot fit; with the arithmetic, and what to do.
        """
        if self.fits:
            return f"estimate for {self.model}: {self.time}; {self.arithmetic}"
        smaller = "fewer tokens or agents, more or larger GPUs"
        if self.machine.is_gpu and not self.model.endswith("@4bit"):
            smaller = f"MODEL={self.model}@4bit (weights in 4 bits), {smaller}"
        raise DoesNotFit(f"{self.model} does not fit: {self.arithmetic}; try {smaller}")


def estimate(chosen: ExperimentParameters, machine: Machine) -> Estimate | None:
    """A point's estimate; None for an experiment not counted or a model whose config is not had."""
    work = work_of(chosen)
    if work is None:
        return None
    from polykv_lib.hf import footprint  # here, because it imports torch

    try:
        model = footprint(chosen.MODEL)
    except (OSError, ValueError):  # loading says why, in words of its own
        return None
    element = BYTES.get(work.dtype, machine.element_bytes)
    per_token = model.geometry.elements_per_token * element
    document = 2 * work.document  # once as computed, once as a pool, which is smaller
    own = work.agents * work.own * per_token
    beside = work.copies.held(per_token, own, machine.is_gpu) if work.copies else 0
    widest = max(work.document, work.scored, work.agents, work.batch)
    logits = work.scored * 2 * element + min(work.scored, CHUNK) * 4 * 4
    layer = widest * element * (LAYER_WIDTHS * model.hidden + 3 * model.intermediate)
    return Estimate(
        model=chosen.MODEL,
        machine=machine,
        weights=model.weight_bytes(element),
        cache=document * per_token + own + beside,
        activations=layer + logits * model.vocabulary,
        seconds=_seconds(work, model, machine, element),
    )


def _seconds(work: Work, model: "Footprint", machine: Machine, element: int) -> float | None:
    if machine.rates is None:
        return None
    rates = machine.rates
    if work.threads and not machine.is_gpu:
        rates = rates.times(work.threads / machine.n_cores)
    flop_s = rates.half_flop_s if element == 2 else rates.flop_s
    attended = 2 * model.geometry.n_layers * model.geometry.n_q_heads * model.geometry.head_dim
    read = work.read + model.geometry.n_layers * work.read_a_layer
    flop = read * (2 * model.n_weights + 2 * attended * work.document)
    weights = model.weight_bytes(element)
    floor = STEP_S * model.geometry.n_layers
    alone = max(floor, weights / rates.bytes_s)
    per_step = alone + 2 * model.n_weights * work.agents / 2 / flop_s
    seconds = flop / flop_s + work.steps * per_step
    if work.copies is not None:
        per_token = model.geometry.elements_per_token * element
        moved = work.copies.moved(per_token, machine.is_gpu)
        seconds += work.copies.turns(per_token) * alone + moved / rates.bytes_s
    return seconds
