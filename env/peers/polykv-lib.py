"""This library under the peers' protocol: one pool, all agents in one batch."""

import sys
from pathlib import Path

import torch
from protocol import Method, Task, main, ordinary

sys.path.append(str(Path(__file__).parents[2]))
from polykv_lib import hf, presets


def methods(task: Task, model) -> dict[str, Method]:
    """A pool for each codec, and an ordinary cache beside them."""
    hf.prepare(model)
    ids = torch.tensor([task.document])

    def shared(codec: str) -> Method:
        chosen = presets.codec(codec)
        options = {"keys": chosen.keys, "values": chosen.values, "n_sink": chosen.n_sink}
        return Method(
            prepare=lambda: hf.build_pool(model, ids, **options),
            answer=lambda pool, prompts, n_tokens: hf.greedy(
                model,
                pool.agent_cache(len(prompts)),
                prompts,
                n_seen=pool.n_tokens,
                max_new_tokens=n_tokens,
            ),
            held_bytes=lambda pool: pool.nbytes,
            about="one pool, one batch; held bytes are the pool's alone",
        )

    return {codec: shared(codec) for codec in ("full", "paper", "polykv", "compact")} | {
        "expanded-batch": ordinary(task, model)
    }


if __name__ == "__main__":
    main([], methods)
