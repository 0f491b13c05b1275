"""Keys and values -> fewer of them: policies score tokens, budgets say how many each head keeps."""

from polykv_lib.evict.base import EvictionPolicy, Protected, keep
from polykv_lib.evict.controls import FullKV, Random
from polykv_lib.evict.h2o import H2O
from polykv_lib.evict.key_norm import KeyNorm
from polykv_lib.evict.keydiff import KeyDiff
from polykv_lib.evict.plan import LayerPlan, Plan
from polykv_lib.evict.rank_merge import RankMerge
from polykv_lib.evict.snapkv import SnapKV
from polykv_lib.evict.streaming_llm import StreamingLLM
from polykv_lib.evict.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "EvictionPolicy",
    "FullKV",
    "KeyDiff",
    "KeyNorm",
    "LayerPlan",
    "Plan",
    "Protected",
    "Random",
    "RankMerge",
    "SnapKV",
    "StreamingLLM",
    "keep",
]
