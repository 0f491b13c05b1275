"""kvpress: two of its presses evict at the prefill; agents decode from copies of what is kept."""

import sys
from functools import partial
from pathlib import Path

# This folder holds a file of the package's own name.
sys.path = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).parent]
from kvpress import ExpectedAttentionPress, SnapKVPress  # noqa: E402

sys.path.append(str(Path(__file__).parent))
from protocol import Method, Task, expanded, greedy, layers_of, main, nbytes, ordinary, read  # noqa: E402
from transformers import DynamicCache  # noqa: E402


def methods(task: Task, model) -> dict[str, Method]:
    """Two presses, and an ordinary cache beside them."""
    n_seen = len(task.document)

    def prepare(press):
        cache = DynamicCache()
        with press(model):
            read(model, task.document, cache)
        layers = layers_of(cache)
        kept = {keys.shape[2] for keys, _ in layers}
        if kept != {int(n_seen * task.keep)}:
            raise RuntimeError(f"asked to keep {task.keep:.0%} of {n_seen} tokens, kept {kept}")
        return layers

    def answer(layers, prompts, n_tokens):
        kept = layers[0][0].shape[2]
        cache = expanded(layers, len(prompts))
        return greedy(model, cache, prompts, n_tokens, n_seen=n_seen, n_held=kept)

    def evicting(press) -> Method:
        return Method(
            prepare=partial(prepare, press(compression_ratio=1 - task.keep)),
            answer=answer,
            held_bytes=lambda layers: task.n_agents * nbytes(layers),
            about=f"{task.keep:.0%} kept, one copy of it an agent",
        )

    return {
        "SnapKV": evicting(SnapKVPress),
        "ExpectedAttention": evicting(ExpectedAttentionPress),
        "expanded-batch": ordinary(task, model),
    }


if __name__ == "__main__":
    main(["kvpress"], methods)
