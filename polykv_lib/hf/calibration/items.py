"""What `calibrate` takes: items, or plain texts that are continued."""

import hashlib
from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from polykv_lib.calibration import EncodedItem
from polykv_lib.hf.prompts import document_ids

TEXT_TOKENS: Final = 1024  # of a plain text that are used
SCORED_TOKENS: Final = 64  # of them, at most, and at most a quarter


def items_of(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str | EncodedItem]
) -> tuple[EncodedItem, ...]:
    """Items as they are; a plain text opens a chat turn as a document does, and is continued.

    Raises:
        ValueError: no text, or one too short to be cut into context and continuation.
    """
    if isinstance(texts, str) or not texts:
        raise ValueError(f"texts={texts!r}; pass a list of at least one text or item.")
    return tuple(t if isinstance(t, EncodedItem) else _continuation(tokenizer, t) for t in texts)


def _continuation(tokenizer: PreTrainedTokenizerBase, text: str) -> EncodedItem:
    ids = document_ids(tokenizer, text)[0, :TEXT_TOKENS].tolist()
    n_scored = min(SCORED_TOKENS, len(ids) // 4)
    if not n_scored:
        raise ValueError(f"the text {text!r} has {len(ids)} tokens; at least 4 are needed.")
    cut = len(ids) - n_scored - 1
    return EncodedItem(
        id=f"text {hashlib.sha256(text.encode()).hexdigest()[:16]}",
        family="text",
        context_ids=tuple(ids[:cut]),
        question_ids=(ids[cut],),
        answer_ids=tuple(ids[cut + 1 :]),
    )
