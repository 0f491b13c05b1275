"""What reading one document costs, by method: steps, first tokens, prefill, encoding, bytes.

Every method's answers are checked against a plain path before its times count, and the methods of
one table are timed in one interleaved run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from polykv_lib import hf
from polykv_lib.attend import chunked
from polykv_lib.study.experiments.common import (
    Say,
    Timer,
    documents,
    dtype_name,
    facts,
    settings,
)
from polykv_lib.study.experiments.speed import bandwidth, checks
from polykv_lib.study.experiments.speed.once import Once
from polykv_lib.study.experiments.speed.steps import FULL, PAPER, Steps, slopes
from polykv_lib.study.experiments.speed.timing import torch_threads
from polykv_lib.study.record import Outcome, Row
from polykv_lib.tasks.agents import questions

N_CHECKED = 3  # agents whose answers are checked


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point; documents and agents are crossed. `geometry*` are for random keys and values."""

    model: str
    seed: int
    dtype: str
    threads: int
    context_tokens: Sequence[int]
    n_agents: Sequence[int]
    codecs: Sequence[str]
    rounds: int
    once_rounds: int
    answer_tokens: int
    max_cache_gb: float
    geometry: str
    geometry_tokens: Sequence[int]
    geometry_agents: Sequence[int]
    geometry_dtypes: Sequence[str]


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Times and bytes of every method on every document, for every number of agents."""
    point = settings(Settings, params)
    with torch_threads(point.threads):
        return _run(point, say)


def _run(point: Settings, say: Say) -> Outcome:
    timer, rows, samples = Timer(), list[Row](), list[dict[str, Any]]()
    dtype = None if point.dtype == "auto" else point.dtype
    model, tokenizer = hf.load_model(point.model, dtype=dtype)
    [text] = documents(tokenizer, n_docs=1, min_tokens=max(point.context_tokens))
    prompts = [hf.question_ids(tokenizer, question) for question in questions(N_CHECKED)]
    attention: dict[str, str] = {}
    machine = {"threads": torch.get_num_threads(), "device": device_name(model.device)}
    for n_tokens in point.context_tokens:
        ids = hf.document_ids(tokenizer, text.text)[:, :n_tokens]
        at = {"model": point.model, "dtype": dtype_name(model), "context_tokens": n_tokens}
        once = Once.read(model, ids, prompts[0], dict.fromkeys((FULL, PAPER, *point.codecs)))
        attention |= way(model.device, once.pools[FULL].geometry.head_dim, model.dtype)
        steps = Steps.of(model, once.pools, prompts[0], point.codecs, point.max_cache_gb)
        rows += checks.rows(steps.lanes, prompts, point.answer_tokens, at | machine)
        say(f"{n_tokens:,} tokens: answers checked, {timer.seconds:.0f} s")
        some, times = once.rows(point.once_rounds, at | machine)
        rows, samples = [*rows, *some], [*samples, *times]
        say(f"{n_tokens:,} tokens: prefill, encoding and first tokens, {timer.seconds:.0f} s")
        of_document: list[Row] = []
        for n in point.n_agents:
            some, times = steps.rows(n, point.rounds, at | machine)
            of_document, samples = [*of_document, *some], [*samples, *times]
            say(f"{n_tokens:,} tokens: {n} agents, {timer.seconds:.0f} s")
        rows += [*of_document, *slopes(of_document)]
    for of_dtype, n_tokens, n in product(
        point.geometry_dtypes, point.geometry_tokens, point.geometry_agents
    ):
        shape = bandwidth.Shape(
            geometry=point.geometry,
            n_tokens=n_tokens,
            n_agents=n,
            dtype=getattr(torch, of_dtype),
            device=model.device,
        )
        attention |= way(model.device, shape.heads.head_dim, shape.dtype)
        codecs = list(dict.fromkeys((FULL, *point.codecs)))
        some, times = bandwidth.rows(shape, codecs, point.rounds, point.seed, machine)
        rows, samples = [*rows, *some], [*samples, *times]
        say(f"{point.geometry}, {n_tokens:,} tokens, {of_dtype}, {timer.seconds:.0f} s")
    return Outcome(
        rows=rows,
        samples=samples,
        protocol={
            **facts(model, tokenizer),
            "threads": torch.get_num_threads(),
            "device_name": device_name(model.device),
            "attention_over_pools": {**attention},
            "document": text.title,
            "step": f"one token for every agent after a question of {len(prompts[0])} tokens; "
            "medians of interleaved rounds after a first one",
            "stock": "DynamicCache, transformers' sdpa attention",
            "not_timed": f"methods whose dense caches exceed {point.max_cache_gb} GB",
            "geometry_data": "random queries, keys and values",
            "seconds": timer.seconds,
        },
    )


def way(device: torch.device, dim: int, dtype: torch.dtype) -> dict[str, str]:
    """How pools are read: in chunks by a fused kernel, where a GPU's passed its test, or blocks."""
    way = "chunks" if chunked.runs_on(device, dim, dtype) else "blocks"
    return {f"{str(dtype).removeprefix('torch.')}, head_dim {dim}": way}


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu" (the processor's name is in the provenance)."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
