"""The names that notebooks and grids may pass, and what each one means.

A codec's name is a preset's, or "keys+values@sinks" made of the names of a side's codecs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from polykv_lib.evict import Plan
from polykv_lib.kv import Geometry
from polykv_lib.pool import Side, Tiered, shared_sinks
from polykv_lib.quantize import (
    Affine,
    FullPrecision,
    HarmonicTurboQuant,
    Int8,
    TurboQuant,
)


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How a pool stores keys and values, and how many first tokens it leaves in full precision."""

    keys: Side
    values: Side
    n_sink: int = 0


def _matched(bits: int) -> TurboQuant:
    """TurboQuant whose decoded vectors have the norms of the originals."""
    return TurboQuant(bits, match_norm=True)


# The same with its norms in bytes.
_TURBO: Final = {b: TurboQuant(b, match_norm=True, norms="byte") for b in (1, 2, 3, 4)}
# Keys without the harmonics of RoPE, coded for small errors of scores.
_SHAPED: Final = {b: HarmonicTurboQuant(b, norms="byte", shaped=True) for b in (2, 3, 4)}

KEYS: Final[dict[str, Side]] = {
    "int8": Int8("channel"),
    **{f"affine{b}": Affine(b, 64, "token") for b in (2, 3, 4)},
    "affine4-128": Affine(4, 128, "token"),
    "affine3-32": Affine(3, 32, "token"),
    **{f"tq{b}": _TURBO[b] for b in (1, 2, 3, 4)},
    **{f"harmonic{b}": HarmonicTurboQuant(b, norms="byte") for b in (2, 3, 4)},
    "harmonic4-half": HarmonicTurboQuant(4),
    **{f"shaped{b}": codec for b, codec in _SHAPED.items()},
    # Shaped without harmonics, which take as many bytes for a few tokens as for many: for
    # evictions that leave few.
    **{f"shaped-tq{b}": TurboQuant(b, norms="byte", shaped=True) for b in (1, 2, 3, 4)},
    "shaped4-3": Tiered((_SHAPED[4], _SHAPED[3]), (0.25,)),
    "shaped4-3-eighth": Tiered((_SHAPED[4], _SHAPED[3]), (0.125,)),
    "full": FullPrecision(),
}
VALUES: Final[dict[str, Side]] = {
    **{f"tq{b}": codec for b, codec in _TURBO.items()},
    "tq3-unmatched": TurboQuant(3, norms="byte"),
    "tq3-half": TurboQuant(3, match_norm=True),
    "tq4-2": Tiered((_TURBO[4], _TURBO[2]), (0.25,)),
    "tq4-3": Tiered((_TURBO[4], _TURBO[3]), (0.25,)),
    "tq4-2-eighth": Tiered((_TURBO[4], _TURBO[2]), (0.125,)),
    **{f"affine{b}": Affine(b, 32, "channel") for b in (2, 3, 4)},
    "full": FullPrecision(),
}
N_SINK: Final = 4  # of a pair that names none
_PAIR: Final = re.compile(r"(?P<keys>[^+@]+)\+(?P<values>[^+@]+?)(@(?P<sinks>\d+))?")

CODECS: Final[dict[str, Callable[[], Codec]]] = {
    "full": lambda: Codec(keys=FullPrecision(), values=FullPrecision()),
    # Paper A exactly: one key scale a layer, Hadamard without signs, no protected tokens.
    "paper": lambda: Codec(keys=Int8("tensor"), values=TurboQuant(3, "plain")),
    "paper-sinks": lambda: Codec(keys=Int8("tensor"), values=TurboQuant(3, "plain"), n_sink=4),
    # This project's: a key scale a channel, signs, matched norms, four sinks. Matched norms and the
    # compact codec were chosen on seven articles outside the offline grid.
    "polykv": lambda: Codec(keys=Int8("channel"), values=_matched(3), n_sink=4),
    "compact": lambda: Codec(keys=Affine(4, 64, "token"), values=_matched(3), n_sink=4),
    # These three were designed on a few articles, of which Altruism is also one of the sixteen that
    # the codec frontier reports on. `shaped` takes the bytes of `lean`; `tiered` has more bits for
    # the quarter of the tokens at which the document's last queries looked most.
    "lean": lambda: codec("harmonic4+tq3"),
    "shaped": lambda: codec("shaped4+tq3"),
    "tiered": lambda: codec("shaped4-3+tq4-2"),
    # The fewest bits whose KL is at most that of `paper` on the half of the articles that selects.
    "slim": lambda: codec("shaped4-3-eighth+tq4-2-eighth"),
    # One change at a time.
    "k-only": lambda: Codec(keys=Int8("tensor"), values=FullPrecision()),
    "v-only": lambda: Codec(keys=FullPrecision(), values=TurboQuant(3, "plain")),
    "int8": lambda: Codec(keys=Int8("channel"), values=Int8("token")),
    "q8-0": lambda: Codec(keys=Int8("block"), values=Int8("block")),
    "tq1": lambda: Codec(keys=Int8("channel"), values=_matched(1), n_sink=4),
    "tq2": lambda: Codec(keys=Int8("channel"), values=_matched(2), n_sink=4),
    "tq4": lambda: Codec(keys=Int8("channel"), values=_matched(4), n_sink=4),
    "tq4-both": lambda: Codec(keys=_matched(4), values=_matched(4), n_sink=4),
    "tq3-both": lambda: Codec(keys=_matched(3), values=_matched(3), n_sink=4),
    "tq2-both": lambda: Codec(keys=_matched(2), values=_matched(2), n_sink=4),
    "tq1-both": lambda: Codec(keys=_matched(1), values=_matched(1), n_sink=4),
    "kivi4": lambda: Codec(keys=Affine(4, 32, "token"), values=Affine(4, 32, "channel")),
    "kivi2": lambda: Codec(keys=Affine(2, 32, "token"), values=Affine(2, 32, "channel")),
}

GEOMETRIES: Final[dict[str, Geometry]] = {
    "smollm2-135m": Geometry(n_layers=30, n_q_heads=9, n_kv_heads=3, head_dim=64),
    "smollm2-1.7b": Geometry(n_layers=24, n_q_heads=32, n_kv_heads=32, head_dim=64),
    "llama-3-8b": Geometry(n_layers=32, n_q_heads=32, n_kv_heads=8, head_dim=128),
    "qwen2.5-7b": Geometry(n_layers=28, n_q_heads=28, n_kv_heads=4, head_dim=128),
    "llama-3-70b": Geometry(n_layers=80, n_q_heads=64, n_kv_heads=8, head_dim=128),
}


def codec(name: str) -> Codec:
    """A preset, or "keys+values@sinks" of the names in `KEYS` and `VALUES`; four sinks unless said.

    Raises:
        ValueError: neither.
    """
    pair = _PAIR.fullmatch(name)
    if pair is None:
        if name not in CODECS:
            raise ValueError(
                f"no codec {name!r}; {_hint(name, list(CODECS))} Or a pair, like 'int8+tq3'."
            )
        return CODECS[name]()
    keys, values = pair["keys"], pair["values"]
    for side, known in ((keys, KEYS), (values, VALUES)):
        if side not in known:
            raise ValueError(f"{name!r}: no codec {side!r}; {_hint(side, list(known))}")
    return Codec(keys=KEYS[keys], values=VALUES[values], n_sink=int(pair["sinks"] or N_SINK))


def of_plan(plan: Plan) -> tuple[list[Side], list[Side], int]:
    """Key codecs and value codecs of a plan's layers, and the sinks that all of them leave alone.

    These are `build_pool`'s `keys`, `values` and `n_sink`. A layer without a codec is not
    quantised.

    Raises:
        ValueError: an unknown codec, or codecs that disagree about the sinks.
    """
    chosen = [codec(layer.codec or "full") for layer in plan.layers]
    return [own.keys for own in chosen], [own.values for own in chosen], shared_sinks(chosen)


def geometry(name: str) -> Geometry:
    """The cache geometry that a notebook parameter names."""
    if name not in GEOMETRIES:
        raise ValueError(f"no geometry {name!r}; {_hint(name, list(GEOMETRIES))}")
    return GEOMETRIES[name]


def _hint(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"Choose one of: {', '.join(known)}."
