"""The only room that imports transformers: models, caches, attention and the verbs over them."""

from polykv_lib.hf.attention import prepare
from polykv_lib.hf.baselines import PooledAgent, expanded_cache, folded_cache, full_cache
from polykv_lib.hf.build import build_pool, load_pool, prefill, share
from polykv_lib.hf.caches import AgentCache, dense_bytes
from polykv_lib.hf.calibration import (
    calibrate,
    calibrate_joint,
    codec_kl,
    evaluate_plans,
    kl_of_each,
    logits_from,
    read_back,
    tail_states,
)
from polykv_lib.hf.evicting import EvictingCache
from polykv_lib.hf.generate import ask, greedy, logits
from polykv_lib.hf.models import (
    Footprint,
    export_model,
    footprint,
    geometry_of,
    load_model,
    model_fingerprint,
    tokenizer_fingerprint,
)
from polykv_lib.hf.observe import observed_cache
from polykv_lib.hf.prompts import document_ids, question_ids, stop_ids
from polykv_lib.hf.reading import evict_document, read_document

__all__ = [
    "AgentCache",
    "EvictingCache",
    "Footprint",
    "PooledAgent",
    "ask",
    "build_pool",
    "calibrate",
    "calibrate_joint",
    "codec_kl",
    "dense_bytes",
    "document_ids",
    "evaluate_plans",
    "evict_document",
    "expanded_cache",
    "export_model",
    "folded_cache",
    "footprint",
    "full_cache",
    "geometry_of",
    "greedy",
    "kl_of_each",
    "load_model",
    "load_pool",
    "logits",
    "logits_from",
    "model_fingerprint",
    "observed_cache",
    "prefill",
    "prepare",
    "question_ids",
    "read_back",
    "read_document",
    "share",
    "stop_ids",
    "tail_states",
    "tokenizer_fingerprint",
]
