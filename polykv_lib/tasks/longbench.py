"""LongBench (arXiv:2308.14508) by its published protocol: 21 tasks, and LongBench-E's 13.

Prompts, lengths and rules are data (`longbench.yaml`). Records come from a local copy, or from a
parquet mirror through `datasets`; the data set's own loading script is never run.
"""

import json
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Final

import yaml

from polykv_lib.tasks.base import Item

MIRROR: Final = "Xnhyacinth/LongBench"  # parquet, one configuration a task
BUCKETS: Final = ("0-4k", "4-8k", "8k+")  # of LongBench-E, by words


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the published protocol says of one task; field meanings are those of `base.Item`."""

    category: str
    metric: str
    max_new_tokens: int
    prompt: str
    extended: bool = False  # part of LongBench-E
    bare: bool = False  # read without a chat template
    first_line: bool = False
    stop_at_newline: bool = False


@cache
def tasks() -> dict[str, Task]:
    """All tasks by name, in the order of the benchmark's own list."""
    text = (files("polykv_lib.tasks") / "longbench.yaml").read_text(encoding="utf-8")
    return {name: Task(**fields) for name, fields in yaml.safe_load(text).items()}


def items(
    task: str, *, n: int | None = None, folder: Path | None = None, extended: bool = False
) -> list[Item]:
    """The first `n` records of a task (all by default) as items, in the order of the file.

    Args:
        task: A name in `tasks()`.
        n: How many.
        folder: A local copy: a folder with `<task>.jsonl`, `data/<task>.jsonl` or `data.zip`, or
            the zip file itself. None reads the parquet mirror.
        extended: LongBench-E's records of the task.

    Raises:
        ValueError: No such task, or LongBench-E lacks it.
        FileNotFoundError: The local copy does not hold the task.
        ConnectionError: The mirror is neither cached nor reachable.
    """
    if task not in tasks():
        raise ValueError(f"no LongBench task {task!r}; choose one of: {', '.join(tasks())}.")
    if extended and not tasks()[task].extended:
        known = ", ".join(name for name, t in tasks().items() if t.extended)
        raise ValueError(f"LongBench-E has no {task}; it has: {known}.")
    name = f"{task}_e" if extended else task
    records = _mirrored(name) if folder is None else _local(name, folder)
    return [_item(task, name, i, record) for i, record in enumerate(islice(records, n))]


def truncated(
    item: Item,
    max_tokens: int,
    *,
    encode: Callable[[str], Sequence[int]],
    decode: Callable[[Sequence[int]], str],
) -> Item:
    """The item with the middle of a long prompt left out, as `pred.py` does before any template.

    A prompt of more than `max_tokens` becomes decode(first half) + decode(last half), so its own
    token count may differ by a few from `max_tokens`.

    Args:
        item: Whose prompt may be too long.
        max_tokens: Tokens of the prompt before the chat template and without the answer.
        encode: Text -> tokens, with the special tokens that the tokenizer adds by itself.
        decode: Tokens -> text, special tokens skipped, spaces left as they are.

    Raises:
        ValueError: The last half does not hold the whole question.
    """
    ids = encode(item.prompt)
    if len(ids) <= max_tokens:
        return item
    half = max_tokens // 2
    head, tail = decode(ids[:half]), decode(ids[-half:])
    if not tail.endswith(item.question):
        raise ValueError(
            f"{item.id}: the last {half} tokens do not hold the question word for word; raise "
            f"max_tokens={max_tokens}, or decode with clean_up_tokenization_spaces=False."
        )
    return replace(item, context=head + tail.removesuffix(item.question))


def bucket(item: Item) -> str:
    """The item's bucket in LongBench-E: by words, below 4,000, below 8,000, or more.

    Raises:
        ValueError: The item has no number of words.
    """
    if item.n_words is None:
        raise ValueError(f"{item.id} has no n_words; LongBench-E's buckets are of LongBench items.")
    return BUCKETS[(item.n_words >= 4_000) + (item.n_words >= 8_000)]


def _item(task: str, name: str, index: int, record: dict[str, Any]) -> Item:
    protocol = tasks()[task]
    before, after = protocol.prompt.split("{context}")
    return Item(
        id=f"longbench/{name}/{record.get('_id', index)}",
        suite="longbench",
        task=name,
        category=protocol.category,
        context=before + record["context"],
        question=after.replace("{input}", record["input"]),
        answers=tuple(record["answers"]),
        metric=protocol.metric,
        max_new_tokens=protocol.max_new_tokens,
        chat_template=not protocol.bare,
        first_line=protocol.first_line,
        stop_at_newline=protocol.stop_at_newline,
        classes=tuple(record["all_classes"] or ()),
        n_words=int(record["length"]),
        source=f"LongBench, {name}",
    )


def _local(name: str, folder: Path) -> Iterable[dict[str, Any]]:
    """Records of `<name>.jsonl` in a folder or zip file."""
    for path in (folder / f"{name}.jsonl", folder / "data" / f"{name}.jsonl"):
        if path.is_file():
            return _records(path.read_bytes())
    archive = folder if folder.suffix == ".zip" else folder / "data.zip"
    if archive.is_file():
        with zipfile.ZipFile(archive) as packed:
            found = [member for member in packed.namelist() if Path(member).name == f"{name}.jsonl"]
            if found:
                return _records(packed.read(found[0]))
    raise FileNotFoundError(
        f"{folder} holds no {name}.jsonl, data/{name}.jsonl or data.zip with it; pass the folder "
        "of LongBench's data.zip, or folder=None to read the parquet mirror."
    )


def _records(jsonl: bytes) -> Iterable[dict[str, Any]]:
    # Bytes end a line at \\n and \\r alone; strings would also at U+2028, which records contain.
    return map(json.loads, filter(None, jsonl.splitlines()))


def _mirrored(name: str) -> Iterable[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return load_dataset(MIRROR, name, split="test")
    except Exception as error:  # the hub client has no common base class for "no network"
        raise ConnectionError(
            f"LongBench's {name} is neither cached nor reachable ({type(error).__name__}). Connect "
            "to a hub once, or pass folder= with a local copy (<task>.jsonl or data.zip)."
        ) from error
