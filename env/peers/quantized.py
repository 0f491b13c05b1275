"""transformers' QuantizedCache with 4 bits, by both integer backends; a quantised copy an agent."""

import torch
from protocol import Method, Task, expanded, greedy, layers_of, main, ordinary, read
from transformers import QuantizedCache

BACKENDS = {"quanto": {"axis_key": 0, "axis_value": 0}, "hqq": {"axis_key": 1, "axis_value": 1}}


def methods(task: Task, model) -> dict[str, Method]:
    """Both backends, and an ordinary cache beside them."""
    n = len(task.document)

    def quantised(backend: str) -> Method:
        def fill(layers, n_agents: int):
            cache = QuantizedCache(backend, model.config, nbits=4, **BACKENDS[backend])
            return expanded(layers, n_agents, cache)

        def answer(layers, prompts, n_tokens):
            cache = fill(layers, len(prompts))
            return greedy(model, cache, prompts, n_tokens, n_seen=n, n_held=n)

        return Method(
            prepare=lambda: layers_of(read(model, task.document)),
            answer=answer,
            held_bytes=lambda layers: task.n_agents * held(fill(layers, 1)),
            about="4 bits, one quantised copy an agent",
        )

    return {f"quantized-{backend}": quantised(backend) for backend in BACKENDS} | {
        "expanded-batch": ordinary(task, model)
    }


def held(cache) -> int:
    """Bytes of every tensor that the quantised layers hold."""
    return sum(
        tensor.numel() * tensor.element_size()
        for layer in cache.layers
        for tensor in tensors_of([layer._quantized_keys, layer._quantized_values])
    )


def tensors_of(value) -> list[torch.Tensor]:
    """Plain tensors inside a backend's value: lists, mappings, and tensors made of tensors."""
    if isinstance(value, torch.Tensor):
        names = value.__tensor_flatten__()[0] if hasattr(value, "__tensor_flatten__") else []
        inner = [tensor for name in names for tensor in tensors_of(getattr(value, name))]
        return inner or [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


if __name__ == "__main__":
    main(["optimum-quanto", "hqq"], methods)
