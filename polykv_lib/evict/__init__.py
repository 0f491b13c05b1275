"""Keys and values -> fewer of them: policies score tokens, budgets say how many each head keeps."""

from polykv_lib.evict.base import EvictionPolicy, Merging, Protected, keep, kept_of, merger_of
from polykv_lib.evict.cake import CAKE
from polykv_lib.evict.cam import CAM
from polykv_lib.evict.controls import FullKV, Guarded, Random
from polykv_lib.evict.d2o import D2O
from polykv_lib.evict.expected_attention import ExpectedAttention
from polykv_lib.evict.h2o import H2O
from polykv_lib.evict.key_norm import KeyNorm
from polykv_lib.evict.keydiff import KeyDiff
from polykv_lib.evict.plan import LayerPlan, Plan
from polykv_lib.evict.pyramidkv import pyramidkv
from polykv_lib.evict.rank_merge import RankMerge
from polykv_lib.evict.scissorhands import Scissorhands
from polykv_lib.evict.snapkv import SnapKV
from polykv_lib.evict.streaming_llm import StreamingLLM
from polykv_lib.evict.tallies import Tally, tallies_of
from polykv_lib.evict.together import counted, evict_each
from polykv_lib.evict.tova import TOVA

__all__ = [
    "CAKE",
    "CAM",
    "D2O",
    "H2O",
    "TOVA",
    "EvictionPolicy",
    "ExpectedAttention",
    "FullKV",
    "Guarded",
    "KeyDiff",
    "KeyNorm",
    "LayerPlan",
    "Merging",
    "Plan",
    "Protected",
    "Random",
    "RankMerge",
    "Scissorhands",
    "SnapKV",
    "StreamingLLM",
    "Tally",
    "counted",
    "evict_each",
    "keep",
    "kept_of",
    "merger_of",
    "pyramidkv",
    "tallies_of",
]
