"""Three sizes, never added silently: the pool at rest, an agent's own tokens, the peak of decoding.

Computed sizes follow from shapes. Measured ones are counted from tensors: pools are built in the
shape of models that do not fit here, and agents run on the model that does.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from polykv_lib import hf
from polykv_lib.kv import Geometry, LayerKV
from polykv_lib.metrics.intervals import median_interval
from polykv_lib.metrics.memory import dense_bytes
from polykv_lib.pool import SharedKVPool, freeze, sizes_of
from polykv_lib.presets import codec as codec_of
from polykv_lib.presets import geometry as geometry_of
from polykv_lib.study.experiments.common import (
    Say,
    Timer,
    compressed,
    documents,
    dtype_name,
    facts,
    row,
    settings,
)
from polykv_lib.study.experiments.speed.decoding import ANSWER_TOKENS, METHODS, Agents, step_ms
from polykv_lib.study.experiments.speed.opening import FEW_TOKENS, PROCESSES, opening_rows
from polykv_lib.study.record import Outcome, Row
from polykv_lib.tasks.agents import questions

BUILT_BYTES = 700_000_000  # a pool is really built where one bfloat16 copy is at most this
AGENTS_CODEC = "paper"  # what the agents' pool is stored with, as in the published way


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point; lists are crossed. `step_*` are for the real model."""

    model: str
    seed: int
    context_tokens: Sequence[int]
    n_agents: Sequence[int]
    geometries: Sequence[str]
    codecs: Sequence[str]
    measured_tokens: Sequence[int]
    step_tokens: Sequence[int]
    step_agents: Sequence[int]
    rounds: int


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Sizes computed from shapes and measured from tensors, peaks, decode times, and opening."""
    timer, point = Timer(), settings(Settings, params)
    rows = list(computed_rows(point))
    for name, codec, n_tokens in product(point.geometries, point.codecs, point.measured_tokens):
        rows += built_rows(name, codec, n_tokens, point.seed)
        say(f"pool of {n_tokens:,} tokens in the shape of {name}, {codec}, {timer.seconds:.0f} s")
    model, tokenizer = hf.load_model(point.model)
    [text] = documents(tokenizer, n_docs=1, min_tokens=max(point.step_tokens))
    question = hf.question_ids(tokenizer, questions(1)[0])
    ids = hf.document_ids(tokenizer, text.text)
    few, *pools = (
        compressed(model, hf.read_document(model, own), own, AGENTS_CODEC)
        for own in (ids[:, :n] for n in (FEW_TOKENS, *point.step_tokens))
    )
    at = {"model": point.model, "dtype": dtype_name(model), "codec": AGENTS_CODEC}
    rows += opening_rows(model, tokenizer, pools, few, point.rounds, at)
    say(f"{len(pools)} saved pools opened, {timer.seconds:.0f} s")
    for pool in pools:
        for n in point.step_agents:
            agents = Agents(model=model, pool=pool, question=question, n=n)
            rows += agent_rows({m: replace(agents, method=m) for m in METHODS}, point)
            say(f"{n} agents on {pool.n_tokens:,} tokens, {timer.seconds:.0f} s")
    return Outcome(
        rows=rows,
        protocol={
            **facts(model, tokenizer),
            "document": text.title,
            "codec_of_the_agents": AGENTS_CODEC,
            "suffix": f"a question of {len(question)} tokens and {ANSWER_TOKENS - 1} of an answer",
            "added_bytes": "whole storages of the agents' tensors, room reserved ahead included",
            "peak_bytes": "above the model; the pool included where the method reads one",
            "step": "one token for every agent, median of interleaved rounds after a first one",
            "opening": f"median of rounds; bytes over {PROCESSES} processes that read one file",
            "computed_dtype": "bfloat16",
            "seconds": timer.seconds,
        },
    )


def computed_rows(point: Settings) -> Iterator[Row]:
    """Sizes from shapes alone."""
    for name, n_tokens, n, codec in product(
        point.geometries, point.context_tokens, point.n_agents, point.codecs
    ):
        geometry = geometry_of(name)
        shared = dense_bytes(geometry, n_tokens)
        without = dense_bytes(geometry, n_tokens, n_copies=n)
        of_layer = sizes_of(codec_of(codec), n_tokens, geometry.head_dim)
        pool = geometry.n_layers * of_layer(geometry.n_kv_heads, n_tokens)
        dims = {
            "geometry": name,
            "context_tokens": n_tokens,
            "n_agents": n,
            "codec": codec,
            "dtype": "bfloat16",
        }
        for metric, value, unit in (
            ("without_bytes", without, "B"),
            ("shared_bytes", shared, "B"),
            ("pool_bytes", pool, "B"),
            ("reduction_pct", 100 * (1 - pool / without), "%"),
            ("memory_ratio", shared / pool, "x"),
        ):
            yield row("pool_memory", metric, value, unit, dims, kind="computed")


def built_rows(name: str, codec: str, n_tokens: int, seed: int) -> Iterator[Row]:
    """Bytes of a pool that is really built; none where it is too large to build here."""
    geometry = geometry_of(name)
    if dense_bytes(geometry, n_tokens) > BUILT_BYTES:
        return
    pool = build(geometry, codec, n_tokens, seed)
    dims = {"geometry": name, "context_tokens": n_tokens, "codec": codec, "dtype": "bfloat16"}
    yield row("pool_memory", "pool_bytes", pool.nbytes, "B", dims)
    yield row("pool_memory", "memory_ratio", pool.full_nbytes() / pool.nbytes, "x", dims)


def build(
    geometry: Geometry,
    codec: str,
    n_tokens: int,
    seed: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
) -> SharedKVPool:
    """A pool in the shape of a model, from random keys and values, at which no query looks.

    Every layer gets the same numbers, since no size depends on them, and is compressed for itself.
    """
    chosen, source = codec_of(codec), torch.Generator().manual_seed(seed)
    shape = (1, geometry.n_kv_heads, n_tokens, geometry.head_dim)
    keys, values = (torch.randn(shape, generator=source).to(device, dtype) for _ in range(2))
    layer = LayerKV(
        keys=keys,
        values=values,
        moments=keys.new_zeros(*shape[:2], shape[-1], shape[-1]),
        attention=keys.new_zeros(shape[:3]),
    )
    return freeze(
        [layer] * geometry.n_layers,
        keys=chosen.keys,
        values=chosen.values,
        n_sink=chosen.n_sink,
        n_q_heads=geometry.n_q_heads,
    )


def agent_rows(methods: Mapping[str, Agents], point: Settings) -> Iterator[Row]:
    """What the agents weigh, what decoding reaches, and how long a step takes."""
    agents = methods["shared-pool"]
    dims = {
        "model": point.model,
        "dtype": dtype_name(agents.model),
        "codec": AGENTS_CODEC,
        "context_tokens": agents.pool.n_tokens,
        "n_agents": agents.n,
    }
    shared = dims | {"method": "shared-pool"}
    suffix, added = agents.suffix()
    yield row("agent_memory", "suffix_bytes_per_agent", suffix, "B", shared)
    yield row("agent_memory", "added_bytes_per_agent", added, "B", shared)
    yield row("agent_memory", "added_over_suffix", added / suffix, "x", shared)
    for method in METHODS[:3]:
        try:
            peak, source = methods[method].peak()
        except torch.OutOfMemoryError:
            peak, source = None, "out of memory"
        yield row(
            "agent_memory", "peak_bytes", peak, "B", dims | {"method": method, "read": source}
        )
    times_ms = step_ms(methods, point.rounds)
    for method in METHODS:
        ms = median_interval(times_ms[method]) if method in times_ms else None
        yield row("decode_step", "ms_per_step", ms, "ms", dims | {"method": method})
