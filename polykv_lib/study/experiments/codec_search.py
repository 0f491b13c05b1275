"""The codecs that the frontier searches: pairs of a key and a value codec, and protected tokens."""

import re
from typing import Final

from polykv_lib import presets
from polykv_lib.pool import Side, Tiered
from polykv_lib.presets import Codec
from polykv_lib.quantize import (
    Affine,
    FullPrecision,
    HarmonicTurboQuant,
    Int8,
    TurboQuant,
)

_SHAPED: Final = {b: HarmonicTurboQuant(b, norms="byte", shaped=True) for b in (2, 3, 4)}
_TURBO: Final = {b: TurboQuant(b, match_norm=True, norms="byte") for b in (1, 2, 3, 4)}

KEYS: Final[dict[str, Side]] = {
    "int8": Int8("channel"),
    **{f"affine{b}": Affine(b, 64, "token") for b in (2, 3, 4)},
    "affine4-128": Affine(4, 128, "token"),
    "affine3-32": Affine(3, 32, "token"),
    **{f"tq{b}": _TURBO[b] for b in (2, 3, 4)},
    **{f"harmonic{b}": HarmonicTurboQuant(b, norms="byte") for b in (2, 3, 4)},
    "harmonic4-half": HarmonicTurboQuant(4),
    **{f"shaped{b}": codec for b, codec in _SHAPED.items()},
    **{f"shaped-tq{b}": TurboQuant(b, norms="byte", shaped=True) for b in (2, 3, 4)},
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
N_SINK: Final = 4
_NAME: Final = re.compile(r"(?P<keys>[^+@]+)\+(?P<values>[^+@]+?)(@(?P<sinks>\d+))?")


def candidate(name: str) -> Codec:
    """A preset, or "keys+values@sinks" of the names above; four sinks unless said.

    Raises:
        ValueError: neither.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return presets.codec(name)
    keys, values = found["keys"], found["values"]
    for side, known in ((keys, KEYS), (values, VALUES)):
        if side not in known:
            raise ValueError(f"{name!r}: no codec {side!r}; choose from: {', '.join(known)}.")
    return Codec(keys=KEYS[keys], values=VALUES[values], n_sink=int(found["sinks"] or N_SINK))
