"""polykv-llm as its authors publish it: a pool on the CPU, agents that decompress it one by one."""

import polykv
import torch
from protocol import Method, Task, main, ordinary


class Ids:
    """Stands where the package expects a tokenizer, so that it reads exactly the given tokens."""

    def encode(self, ids: list[int], return_tensors: str) -> torch.Tensor:
        """The given tokens as a batch of one."""
        return torch.tensor([ids])

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> list[int]:
        """The new tokens as they are."""
        return ids.tolist()


def methods(task: Task, model) -> dict[str, Method]:
    """The published pool and agents, and an ordinary cache beside them."""

    def answer(pool, prompts, n_tokens):
        agents = polykv.create_agents(pool, model, Ids(), n=len(prompts))
        return [
            agent.generate(prompt, max_tokens=n_tokens)
            for agent, prompt in zip(agents, prompts, strict=True)
        ]

    def held_bytes(pool) -> int:
        blocks = pool.blocks.values()
        tensors = [t for b in blocks for t in (b.q_k, b.k_scale, b.v_indices, b.v_norms)]
        return sum(t.numel() * t.element_size() for t in tensors)

    pooled = Method(
        prepare=lambda: polykv.compress(model, Ids(), task.document),
        answer=answer,
        held_bytes=held_bytes,
        about="shared pool, each agent decompresses it; held bytes are the pool's alone",
    )
    return {"pooled-agent": pooled, "expanded-batch": ordinary(task, model)}


if __name__ == "__main__":
    main(["polykv-llm"], methods)
