"""Keys without the harmonics that RoPE makes of their means, then TurboQuant."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from polykv_lib.quantize.base import Quantized, check_input, decode, in_range
from polykv_lib.quantize.turboquant import TurboQuant

RUN = 64  # tokens whose turns differ by one factor
ZOOM = 4  # the last parabola's points lie so many times closer than the spectrum's


@dataclass(frozen=True)
class HarmonicTurboQuant:
    """x_hat[t] = a exp(i f t) + TurboQuant(x[t] - a exp(i f t)), for keys after RoPE.

    RoPE (arXiv:2104.09864) turns channels j and j + d/2 of token t, as one complex number, by the
    angle f_j t. A mean of the keys before it is one harmonic after it, and holds most of a key's
    energy; what is left is several times smaller, and so is its rounding. Here f_j is the maximum
    of the pair's periodogram over the tokens given, the heads together, and a the amplitude of each
    head at f_j: nothing about the model's RoPE needs to be known. Tokens that are not consecutive
    (an evicted piece) lose some of the gain, keys without RoPE all of it.

    Stored: bits + 16 / d + 48 / T bits a number: packed codes and an fp16 norm a vector (matched,
    see TurboQuant; 8 / d with norms="byte"), fp32 amplitudes and frequencies a head.

    Args:
        bits: 1 to 4.
        seed: of the rotation's signs.
        norms: as TurboQuant stores them.
        shaped: as TurboQuant chooses codes.
    """

    bits: int = 4
    seed: int = 0
    norms: Literal["half", "byte"] = "half"
    shaped: bool = False

    def __post_init__(self) -> None:
        self.rest()

    def quantize(
        self, x: Float[Tensor, "*batch token dim"], moments: Tensor | None = None
    ) -> Quantized:
        """Packed codes and norms of the rest, and the harmonics [*batch, 3, dim / 2].

        `moments` as TurboQuant takes them.
        """
        check_input(x, self)
        if x.shape[-1] % 2:
            raise ValueError(
                f"{self} got vectors of {x.shape[-1]} channels; RoPE turns pairs of channels, so "
                "their number must be even. Use TurboQuant."
            )
        x32 = x.detach().float().contiguous()
        lines = _harmonics(x32)
        q = self.rest().quantize(x32 - _evaluate(lines, 0, x.shape[-2]), moments)
        return replace(q, zero=lines, dtype=x.dtype)

    def dequantize(self, q: Quantized) -> Float[Tensor, "*batch token dim"]:
        """The harmonics plus the decoded rest."""
        return decode(self, q)

    def levels(
        self, q: Quantized, start: int, stop: int, dtype: torch.dtype
    ) -> Float[Tensor, "*batch token dim"]:
        """Harmonics and rest in the rotated basis, norms included."""
        assert q.zero is not None
        rest = self.rest()
        levels = rest.levels(q, start, stop, torch.float32)
        levels = levels * rest.gains(q, start, stop).unsqueeze(-1)
        return in_range(levels + rest.to_levels(q, _evaluate(q.zero, start, stop)), dtype)

    def gains(self, q: Quantized, start: int, stop: int) -> None:
        """None: levels are the values, rotated."""

    def to_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows, rotated."""
        return self.rest().to_levels(q, rows)

    def from_levels(
        self, q: Quantized, rows: Float[Tensor, "*batch row dim"]
    ) -> Float[Tensor, "*batch row dim"]:
        """The rows, rotated back."""
        return self.rest().from_levels(q, rows)

    def rest(self) -> TurboQuant:
        """The codec of what the harmonics leave."""
        return TurboQuant(
            self.bits, seed=self.seed, match_norm=True, norms=self.norms, shaped=self.shaped
        )


def _harmonics(x: Float[Tensor, "*batch token dim"]) -> Float[Tensor, "*batch three pair"]:
    """Real and imaginary amplitudes of each head, and the pairs' frequencies (rad a token)."""
    n_tokens = x.shape[-2]
    z = torch.complex(*x.chunk(2, dim=-1))
    if not n_tokens:
        return x.new_zeros(*z.shape[:-2], 3, z.shape[-1])
    scaled = z / x.abs().amax().clamp_min(torch.finfo(x.dtype).tiny)
    n = 1 << n_tokens.bit_length()
    power = _power(torch.fft.fft(scaled, n, dim=-2))
    peak = power.argmax(0)
    near = torch.stack([power.gather(0, (peak + i)[None] % n)[0] for i in (-1, 0, 1)])
    frequency = 2 * torch.pi / n * (peak + _top(near))
    # The same once more, closer, around what was found.
    step = 2 * torch.pi / n / ZOOM
    aside = _turns(step * torch.tensor([1.0, 0.0, -1.0], device=x.device), 0, n_tokens)
    turned = scaled * _turns(-frequency, 0, n_tokens)
    frequency = frequency + step * _top(_power(aside.mT @ turned))
    frequency = torch.where(frequency > torch.pi, frequency - 2 * torch.pi, frequency)
    amplitude = (z * _turns(-frequency, 0, n_tokens)).mean(-2)
    return torch.stack(
        (amplitude.real, amplitude.imag, frequency.expand_as(amplitude.real)), dim=-2
    )


def _power(z: Complex[Tensor, "*batch frequency pair"]) -> Float[Tensor, "frequency pair"]:
    """The heads' energies together."""
    power = torch.view_as_real(z).square().sum(-1)
    return power.flatten(0, -3).sum(0) if power.dim() > 2 else power


def _top(near: Float[Tensor, "three pair"]) -> Float[Tensor, " pair"]:
    """Where the parabola through three points, one apart, is highest; at most half a step away."""
    before, here, after = near
    bend = before - 2 * here + after
    return torch.where(bend < 0, (before - after) / (2 * bend), 0.0).clamp(-0.5, 0.5)


def _evaluate(
    lines: Float[Tensor, "*batch three pair"], start: int, stop: int
) -> Float[Tensor, "*batch token dim"]:
    """The harmonics at tokens start..stop."""
    real, imaginary, frequency = (line.unsqueeze(-2) for line in lines.unbind(-2))
    frequency = frequency.reshape(-1, lines.shape[-1])[0]  # one for all heads
    z = torch.complex(real, imaginary) * _turns(frequency, start, stop)
    return torch.cat((z.real, z.imag), dim=-1)


def _turns(
    frequency: Float[Tensor, " pair"], start: int, stop: int
) -> Complex[Tensor, "token pair"]:
    """exp(i f t); the angles in fp64, since f t grows with the document.

    As products of the turns to every RUN-th token and those within RUN: few angles to look up.
    """
    first = _exp(frequency, torch.arange(start, stop, RUN, device=frequency.device))
    within = _exp(frequency, torch.arange(RUN, device=frequency.device))
    return (first[:, None] * within).flatten(0, 1)[: stop - start]


def _exp(
    frequency: Float[Tensor, " pair"], tokens: Int[Tensor, " token"]
) -> Complex[Tensor, "token pair"]:
    angles = tokens.double()[:, None] * frequency.double()
    return torch.complex(angles.cos().float(), angles.sin().float())
