"""Pool -> answers: feed tokens after a document, and generate for many agents in one batch."""

from collections.abc import Iterable, Sequence, Set
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from polykv_lib.hf import compat, prompts
from polykv_lib.hf.checks import check_length, check_owner
from polykv_lib.pool import SharedKVPool


@torch.no_grad()
def logits(
    model: PreTrainedModel,
    cache: Any,
    ids: Int[Tensor, "agent token"],
    n_seen: int,
    *,
    keep: int = 0,
) -> Float[Tensor, "agent kept vocab"]:
    """Logits in fp32 of tokens fed after `n_seen` others that the cache has seen.

    Of the last `keep` tokens alone; 0 for all.
    """
    positions = n_seen + torch.arange(ids.shape[1], device=model.device)
    output = compat.forward(
        model,
        ids.to(model.device),
        cache,
        position_ids=positions.expand(ids.shape),
        logits_to_keep=keep,
    )
    return output.logits.float()


@torch.no_grad()
def greedy(
    model: PreTrainedModel,
    cache: Any,
    prompts: Sequence[Sequence[int]],
    *,
    n_seen: int,
    max_new_tokens: int,
    stop_ids: Set[int] = frozenset(),
) -> list[list[int]]:
    """Greedy continuations of ragged prompts in one batch, after `n_seen` tokens in the cache.

    Prompts are padded on the left; each row's positions go on from `n_seen`. A row ends at a stop
    token, which is not returned.
    """
    width = max(map(len, prompts))
    padding = torch.tensor([width - len(p) for p in prompts], device=model.device)
    rows = [[0] * (width - len(p)) + list(p) for p in prompts]
    ids = torch.tensor(rows, device=model.device)
    own_mask = (torch.arange(width, device=model.device) >= padding[:, None]).long()
    mask = torch.cat([own_mask.new_ones(len(prompts), n_seen), own_mask], dim=1)
    positions = n_seen + (own_mask.cumsum(1) - 1).clamp_min(0)
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        output = compat.forward(
            model, ids, cache, position_ids=positions, attention_mask=mask, logits_to_keep=1
        )
        ids = output.logits[:, -1:].argmax(-1)
        for row, token in enumerate(ids[:, 0].tolist()):
            if row in running and token not in stop_ids:
                answers[row].append(token)
            else:
                running.discard(row)
        if not running:
            break
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    return answers


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pool: SharedKVPool,
    questions: Iterable[str],
    *,
    max_new_tokens: int = 64,
) -> list[str]:
    """Greedy answers to all questions at once, one agent each, over one pool.

    Each question closes the user's turn that the document opened (`hf.document_ids`); after a
    document of bare tokens it forms a turn of its own.

    Raises:
        ValueError: no question, one that is empty or no text, or one too long for the model's
            positions.
    """
    if isinstance(questions, str) or not isinstance(questions, Iterable):
        raise ValueError(f"questions={questions!r}; pass a list of strings, one for each agent.")
    questions = list(questions)
    if not questions:
        raise ValueError(f"questions={questions!r}; pass a list of strings, one for each agent.")
    for i, question in enumerate(questions):
        if not isinstance(question, str):
            raise ValueError(f"question {i} is {question!r}; pass a string.")
    if not isinstance(max_new_tokens, Integral) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens!r}; an answer has at least one token.")
    check_owner(pool, "the pool", model, tokenizer)
    is_open = prompts.turn_is_open(tokenizer, pool.document_ids)
    own = [prompts.question_ids(tokenizer, q, turn_is_open=is_open) for q in questions]
    longest = max(range(len(own)), key=lambda i: len(own[i]))
    total = pool.n_tokens + len(own[longest]) + max_new_tokens
    check_length(model, total, f"the text of document, question {longest} and its answer")
    answers = greedy(
        model,
        pool.agent_cache(len(own)),
        own,
        n_seen=pool.n_tokens,
        max_new_tokens=max_new_tokens,
        stop_ids=prompts.stop_ids(tokenizer, model.generation_config.eos_token_id),
    )
    return [tokenizer.decode(a, skip_special_tokens=True).strip() for a in answers]
