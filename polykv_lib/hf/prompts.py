"""Text -> tokens, so that document and questions together form one well-formed conversation."""

from functools import cache

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# Private-use characters, which no real text holds.
_DOCUMENT, _QUESTION = "\ue000document\ue000", "\ue000question\ue000"
SEPARATOR = "\n\n"


def document_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Int[Tensor, "1 token"]:
    """The document as the beginning of a user's message; the turn stays open for a question.

    Without a chat template: the begin-of-text token, if the tokenizer has one, and the text.
    """
    if not isinstance(text, str):
        raise ValueError(f"the document is a {type(text).__name__}; pass its text as a string.")
    if not text.strip():
        raise ValueError("the document is empty; a pool needs at least one token of text.")
    opening, _, _ = _turn(tokenizer)
    return torch.tensor([_encode(tokenizer, opening + text)])


def question_ids(
    tokenizer: PreTrainedTokenizerBase, question: str, *, turn_is_open: bool = True
) -> list[int]:
    """The question, the end of the user's turn and the beginning of the assistant's.

    With `turn_is_open` false (a document that was not put into a user's turn) it opens one first.
    """
    if not question.strip():
        raise ValueError("a question is empty; pass at least one word for each agent.")
    opening, separator, closing = _turn(tokenizer)
    if turn_is_open:
        return _encode(tokenizer, separator + question + closing)
    begin = tokenizer.bos_token or ""
    return _encode(tokenizer, separator + opening.removeprefix(begin) + question + closing)


def turn_is_open(tokenizer: PreTrainedTokenizerBase, ids: Int[Tensor, " token"]) -> bool:
    """Whether a document's tokens begin as `document_ids` begins them."""
    opening = _encode(tokenizer, _turn(tokenizer)[0])[:-1]  # the last one may fuse with the text
    return ids[: len(opening)].tolist() == opening


def stop_ids(tokenizer: PreTrainedTokenizerBase, model_eos: int | list[int] | None) -> set[int]:
    """Tokens that end an answer: the tokenizer's, the model's, and the end of a chat turn."""
    from_model = model_eos if isinstance(model_eos, list) else [model_eos]
    turn_ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|eot_id|>", "<|end|>"])
    found = {tokenizer.eos_token_id, *from_model, *turn_ends}
    return {i for i in found if i is not None and i != tokenizer.unk_token_id}


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _turn(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    """Text before the document, between document and question, and after the question."""
    if tokenizer.chat_template is None:
        return tokenizer.bos_token or "", SEPARATOR, "\n"
    return _render(tokenizer)


@cache
def _render(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str, str]:
    content = _DOCUMENT + SEPARATOR + _QUESTION
    rendered: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    before, rest = rendered.split(_DOCUMENT)
    between, after = rest.split(_QUESTION)
    return before, between, after
