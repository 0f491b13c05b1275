"""Codecs by rank: the tokens that queries look at most are stored in more bits.

An error of a value reaches an answer times the attention that its token receives, and an error of a
key changes the weight of that token alone; attention is far from even. (Mixed precision by a
token's importance: MiKV, arXiv:2402.18096; ZipCache, arXiv:2405.14256. Here keys and values are
cut into tiers each for itself, and every tier is a piece of the pool with codecs of its own.)
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

from polykv_lib.quantize import FullPrecision, Quantizer, check_codec


@dataclass(frozen=True)
class Tiered:
    """The first share of a head's tokens, ranked by attention, gets the first codec, and so on.

    Attention is that of the document's last 64 queries (`evict.attention.recent_attention`).

    Args:
        codecs: one more than shares; the last one takes the rest.
        shares: of the tokens that a head keeps in codecs, each between 0 and 1.
    """

    codecs: tuple[Quantizer, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        for codec in self.codecs:
            check_codec(codec, "Tiered(codecs)")
        fair = all(isinstance(share, int | float) and 0 < share < 1 for share in self.shares)
        if len(self.codecs) != len(self.shares) + 1 or not fair or sum(self.shares) >= 1:
            raise ValueError(
                f"Tiered of {len(self.codecs)} codecs with shares {self.shares}; pass a share "
                "between 0 and 1 for every codec but the last, less than 1 together."
            )

    def stops(self, n_tokens: int) -> list[int]:
        """Where each codec's tokens end, in a ranking of so many."""
        sums = [sum(self.shares[: i + 1]) for i in range(len(self.shares))]
        return [*(round(share * n_tokens) for share in sums), n_tokens]


Side: TypeAlias = Quantizer | Tiered  # of all keys, or all values, of a layer


def tiers(
    keys: Side, values: Side, n_tokens: int
) -> Iterator[tuple[int, int, Quantizer, Quantizer]]:
    """(start, stop, key codec, value codec) of a ranking's parts in which neither codec changes."""
    sides = [_parts(codec, n_tokens) for codec in (keys, values)]
    for start, stop in pairwise(sorted({0, *(end for side in sides for _, end in side)})):
        key, value = (next(codec for codec, end in side if start < end) for side in sides)
        yield start, stop, key, value


def is_lossless(keys: Side, values: Side) -> bool:
    """Whether a layer is stored as it is, so that no token needs protecting."""
    return keys == values == FullPrecision()


def shared_sinks(codecs: Iterable[Any]) -> int:
    """The first tokens that a pool of these codecs leaves in full precision.

    Each has `keys`, `values` and `n_sink`, such as those of `presets`.

    Raises:
        ValueError: they disagree.
    """
    sinks = {own.n_sink for own in codecs if not is_lossless(own.keys, own.values)}
    if len(sinks) > 1:
        raise ValueError(
            f"the codecs leave {sorted(sinks)} first tokens in full precision; a pool leaves one "
            "number of them. Choose codecs that agree."
        )
    return max(sinks, default=0)


def _parts(codec: Side, n_tokens: int) -> list[tuple[Quantizer, int]]:
    if not isinstance(codec, Tiered):
        return [(codec, n_tokens)]
    return list(zip(codec.codecs, codec.stops(n_tokens), strict=True))
