"""What every peer does alike: the same model and tokens, one greedy loop, turns taken in rounds.

A peer is a script beside this file. `main` hands it the task on stdin and prints its results as one
JSON object on stdout; nothing here knows polykv_lib, whose environment is another one.
"""

import gc
import importlib.metadata
import inspect
import json
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial

import torch
from transformers import AutoModelForCausalLM, DynamicCache


@dataclass(frozen=True)
class Task:
    """What to read and to answer. `n_agents` prompts are the given ones, over and over."""

    model: str
    dtype: str
    threads: int
    document: list[int]
    prompts: list[list[int]]
    n_agents: int
    answer_tokens: int
    rounds: int
    keep: float

    @property
    def asked(self) -> list[list[int]]:
        """One prompt an agent."""
        return [self.prompts[i % len(self.prompts)] for i in range(self.n_agents)]


@dataclass
class Method:
    """One way to answer: `prepare` reads the document once, `answer` is one round of all agents."""

    prepare: Callable[[], object]
    answer: Callable[[object, list[list[int]], int], list[list[int]]]
    held_bytes: Callable[[object], int]
    about: str = ""


def main(packages: list[str], methods: Callable[[Task, object], dict[str, Method]]) -> None:
    """Run every method of a peer and print what was measured."""
    task = Task(**json.load(sys.stdin))
    torch.set_num_threads(task.threads)
    with redirect_stdout(sys.stderr), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            task.model, dtype=getattr(torch, task.dtype), attn_implementation="sdpa"
        ).eval()
        model.generation_config.eos_token_id = None  # every answer has the same length
        results = measure(task, methods(task, model))
    versions = {
        name: importlib.metadata.version(name) for name in [*packages, "torch", "transformers"]
    }
    print(
        json.dumps({"packages": versions, "threads": torch.get_num_threads(), "methods": results})
    )


def measure(task: Task, methods: dict[str, Method]) -> dict[str, dict]:
    """Milliseconds of each method in each round, interleaved, after a first round that warms up."""
    results = {name: {"read_ms": [], "first_ms": [], "answers_ms": []} for name in methods}
    for turn in range(1 + task.rounds):
        for name, method in methods.items():
            read_ms, document = timed(method.prepare)
            first_ms, _ = timed(partial(method.answer, document, task.asked[:1], 1))
            answer = partial(method.answer, document, task.asked, task.answer_tokens)
            answers_ms, answers = timed(answer)
            if turn == 0:
                held = {"answers": answers, "held_bytes": method.held_bytes(document)}
                results[name] |= held | {"about": method.about}
            else:
                results[name]["read_ms"].append(read_ms)
                results[name]["first_ms"].append(first_ms)
                results[name]["answers_ms"].append(answers_ms)
            del document, answer
            gc.collect()
    return results


def timed(call: Callable[[], object]) -> tuple[float, object]:
    """Milliseconds of a call, and what it returned."""
    start_s = time.perf_counter()
    value = call()
    return 1000 * (time.perf_counter() - start_s), value


def read(model, ids: list[int], cache=None):
    """One plain prefill without logits of the vocabulary; its cache."""
    cache = DynamicCache() if cache is None else cache
    forward(model.base_model, torch.tensor([ids]), cache)
    return cache


def layers_of(cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of every layer of an ordinary cache."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def nbytes(layers) -> int:
    """Bytes of keys and values."""
    return sum(side.numel() * side.element_size() for layer in layers for side in layer)


def expanded(layers, n: int, cache=None):
    """A cache that holds n copies of the document."""
    cache = DynamicCache() if cache is None else cache
    for i, (keys, values) in enumerate(layers):
        cache.update(keys.repeat_interleave(n, 0), values.repeat_interleave(n, 0), i)
    return cache


def greedy(model, cache, prompts, n_tokens: int, *, n_seen: int, n_held: int) -> list[list[int]]:
    """Greedy answers of a batch; `n_seen` tokens came before, of which the cache holds `n_held`."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    own = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    mask = torch.cat([own.new_ones(len(prompts), n_held), own], 1)
    positions = n_seen + (own.cumsum(1) - 1).clamp_min(0)
    steps = []
    for _ in range(n_tokens):
        output = forward(
            model, ids, cache, position_ids=positions, attention_mask=mask, logits_to_keep=1
        )
        ids = output.logits[:, -1:].argmax(-1)
        steps.append(ids)
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
    return torch.cat(steps, 1).tolist()


def forward(model, ids, cache, **arguments):
    """The model on a cache, under the name that this release gives the argument."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(input_ids=ids, use_cache=True, **{name: cache}, **arguments)


def ordinary(task: Task, model) -> Method:
    """The yardstick of every peer: an ordinary cache with a dense copy an agent, in one batch."""

    def answer(layers, prompts, n_tokens):
        cache = expanded(layers, len(prompts))
        n = len(task.document)
        return greedy(model, cache, prompts, n_tokens, n_seen=n, n_held=n)

    return Method(
        prepare=lambda: layers_of(read(model, task.document)),
        answer=answer,
        held_bytes=lambda layers: task.n_agents * nbytes(layers),
        about="DynamicCache, one dense copy an agent",
    )
