"""What the experiments share: settings by name, documents, rows, and how a model really ran."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from polykv_lib import hf, presets
from polykv_lib.attend import native
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.intervals import Interval
from polykv_lib.pool import SharedKVPool
from polykv_lib.study.record import Row
from polykv_lib.tasks.texts import Article, articles

Say = Callable[[str], None]
S = TypeVar("S")
CORPUS = "Wikipedia"


@dataclass(frozen=True, kw_only=True)
class Document:
    """One text and its token ids, without special tokens; `corpus` names the collection."""

    title: str
    corpus: str
    text: str
    ids: Int[Tensor, " token"]


def settings(kind: Callable[..., S], params: Mapping[str, Any]) -> S:
    """The parameters of a point, whose names are in capitals, as the experiment's own value."""
    return kind(**{name.lower(): value for name, value in params.items()})


def tokenised(tokenizer: Any, article: Article, corpus: str = CORPUS) -> Document:
    """An article with its token ids."""
    ids = tokenizer(article.text, add_special_tokens=False, verbose=False)["input_ids"]
    return Document(
        title=article.title,
        corpus=corpus,
        text=article.text,
        ids=torch.tensor(ids, dtype=torch.int64),
    )


def documents(tokenizer: Any, *, n_docs: int | None, min_tokens: int) -> list[Document]:
    """The first `n_docs` articles (None: all) of at least `min_tokens` tokens, in dump order.

    Raises:
        ValueError: There are fewer such articles.
    """
    long = (tokenised(tokenizer, article) for article in articles(min_chars=min_tokens))
    found = list(islice((d for d in long if len(d.ids) >= min_tokens), n_docs))
    if n_docs is not None and len(found) < n_docs:
        raise ValueError(
            f"{n_docs} articles of at least {min_tokens:,} tokens are needed, but there are "
            f"{len(found)}; use fewer documents or fewer tokens."
        )
    return found


def compressed(
    model: Any, layers: Sequence[LayerKV], ids: Int[Tensor, "1 token"], codec: str
) -> SharedKVPool:
    """The pool that a codec's name stands for, from keys and values already computed."""
    chosen = presets.codec(codec)
    return hf.share(
        model, layers, ids, keys=chosen.keys, values=chosen.values, n_sink=chosen.n_sink
    )


def row(
    table: str,
    metric: str,
    value: int | float | Interval | None,
    unit: str,
    dims: Mapping[str, Any],
    *,
    kind: Literal["measured", "computed"] = "measured",
    n: int | None = None,
) -> Row:
    """One number; an Interval brings its bounds and its n along."""
    bounds: dict[str, Any] = {"n": n}
    if isinstance(value, Interval):
        bounds = {"lo": value.lo, "hi": value.hi, "n": value.n}
        value = value.value
    return Row(
        table=table, metric=metric, value=value, unit=unit, kind=kind, dims=dict(dims), **bounds
    )


def facts(model: Any, tokenizer: Any) -> dict[str, Any]:
    """How the model really runs, read back from it, for the point's provenance."""
    weight = next(model.parameters())
    return {
        "model": model.config.name_or_path,
        "model_fingerprint": hf.model_fingerprint(model),
        "tokenizer_fingerprint": hf.tokenizer_fingerprint(tokenizer),
        "dtype": dtype_name(model),
        "attention": model.config._attn_implementation,
        "native_attention": native.status(),
        "device": str(weight.device),
    }


def dtype_name(model: Any) -> str:
    """The dtype of the model's weights, as torch names it, without the module."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


class Timer:
    """Seconds since it was made, for the parts of an experiment."""

    def __init__(self) -> None:
        self.start_s = time.perf_counter()

    @property
    def seconds(self) -> float:
        return round(time.perf_counter() - self.start_s, 1)
