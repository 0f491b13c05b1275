"""Dense copies of a document that throughput's methods make, and the shape that it times alone."""

from dataclasses import dataclass
from math import ceil
from typing import Final

COPIERS: Final = 4  # methods with a dense copy an agent, all alive at once
STOCK: Final = 12  # passes over one's copies that they take together on a CPU: stock attention 5
PACKED: Final = 0.4  # a pool's size, of a dense copy's
BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Dense copies of a document, one an agent, that steps read; and a shape timed alone."""

    sizes: tuple[tuple[int, int], ...]  # agents and tokens of each setting
    limit: float  # bytes of one method's copies; a setting with more is left out
    rounds: int  # steps of each method in each setting
    methods: int  # whose caches are alive at once
    n_pools: int  # beside an uncompressed one
    shape: str  # geometry whose attention is timed alone
    shape_tokens: tuple[int, ...]
    shape_settings: int  # numbers of agents and dtypes, for each of the tokens
    shape_rounds: int
    shape_dtypes: tuple[str, ...]

    def fitting(self, per_token: int) -> list[tuple[int, int]]:
        """Bytes of one method's copies, and agents, of each setting that is not left out."""
        sizes = [(n * tokens * per_token, n) for n, tokens in self.sizes]
        return [(nbytes, n) for nbytes, n in sizes if nbytes <= self.limit]

    def held(self, per_token: int, own: int, is_gpu: bool) -> int:
        """Bytes beside a document, one pool of it and one method's own tokens (`own` bytes).

        That is the other pools with all methods' copies and own tokens, or with the shape that is
        timed afterwards, whichever is larger. On a GPU a method whose caches find no room beside
        the others is left out, so none but the first counts.
        """
        pools = PACKED * self.n_pools * per_token * max(tokens for _, tokens in self.sizes)
        dense = max((nbytes for nbytes, _ in self.fitting(per_token)), default=0)
        together = 0 if is_gpu else COPIERS * dense + (self.methods - 1) * own
        shape = (2 + PACKED * self.n_pools) * max(self.shape_tokens, default=0)
        return ceil(pools + max(together, shape * self._of_shape))

    def moved(self, per_token: int, is_gpu: bool) -> int:
        """Bytes of copies, pools and the shape that all steps read."""
        copies = sum(nbytes for nbytes, _ in self.fitting(per_token))
        pools = (1 + self.n_pools) * per_token * sum(tokens for _, tokens in self.sizes)
        shape = self.shape_rounds * self.shape_settings * sum(self.shape_tokens) * self._of_shape
        passes = COPIERS if is_gpu else STOCK
        return self.rounds * (passes * copies + pools) + (3 + self.n_pools) * shape

    def turns(self, per_token: int) -> int:
        """Steps of a single agent, of the method that serves agents one after another."""
        return self.rounds * sum(n for _, n in self.fitting(per_token))

    @property
    def _of_shape(self) -> int:
        from polykv_lib.presets import geometry  # here, because it imports torch

        element = max((BYTES[dtype] for dtype in self.shape_dtypes), default=0)
        return element * geometry(self.shape).elements_per_token
