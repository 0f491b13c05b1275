"""Other packages under one protocol: each in its own environment, on the same model and tokens.

A peer is `env/peers/<name>.py`, which reads a task as JSON and answers with what it measured; this
library is one of them. Peers take turns, process by process, and each also times an ordinary cache
in its own environment, so that a drift of the machine shows.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from polykv_lib.metrics.intervals import median_interval
from polykv_lib.study import provenance
from polykv_lib.study.experiments.speed.timing import per_second
from polykv_lib.study.record import Record, Row
from polykv_lib.study.store import Store, key_of

EXPERIMENT: Final = "throughput_peers"
LOSSLESS: Final = ("expanded-batch", "full")
EVICTING: Final = ("SnapKV", "ExpectedAttention")  # their answers may differ: tokens are gone
MIN_EQUAL: Final = 0.5  # of the reference's greedy tokens, or a method that keeps all has no time
TIMES: Final = {"read_ms": "ms", "first_ms": "ms", "answers_ms": "ms"}
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """What every peer is asked to do; documents and agents are crossed.

    `passes` starts every peer's process so many times, in turns; `rounds` are inside each process.
    Evicting peers keep the share `keep` of the document.
    """

    model: str = "smollm2-135m"
    dtype: str = "bfloat16"
    threads: int = 1
    context_tokens: tuple[int, ...] = (512, 2048)
    n_agents: tuple[int, ...] = (1, 15)
    answer_tokens: int = 16
    rounds: int = 2
    passes: int = 2
    keep: float = 0.25

    @property
    def params(self) -> dict[str, Any]:
        """As they are stored, and hashed into the record's key."""
        return {name.upper(): value for name, value in json.loads(json.dumps(asdict(self))).items()}


SMOKE: Final = Point(context_tokens=(64,), n_agents=(2,), answer_tokens=3, rounds=1, passes=1)


def run(point: Point, profile: str, store: Store, root: Path, say: Say) -> Record:
    """Measures every peer that installs, and stores one record; why others do not is in it."""
    started = provenance.now()
    peers = environments(root)
    missing = {peer: text for peer, text in peers.items() if not Path(text).is_file()}
    rows, samples = list[Row](), list[dict[str, Any]]()
    with TemporaryDirectory() as folder:
        for task, reference in tasks(point, Path(folder)):
            size = {"context_tokens": len(task["document"]), "n_agents": task["n_agents"]}
            passes: dict[str, list[dict[str, Any]]] = {p: [] for p in peers if p not in missing}
            for peer in list(passes) * point.passes:
                say(f"{peer}: {size['context_tokens']:,} tokens, {size['n_agents']} agents")
                passes[peer].append(ask(root, peer, peers[peer], task))
            for peer, found in passes.items():
                at = {"model": point.model, "dtype": point.dtype, "peer": peer} | size
                rows += rows_of(found, reference, at)
                samples += [at | {"measured": json.dumps(one)} for one in found]
    record = Record(
        experiment=EXPERIMENT,
        key=key_of(EXPERIMENT, point.params),
        params=point.params,
        status="ok",
        rows=rows,
        samples=samples,
        provenance={
            **provenance.describe(),
            "profile": profile,
            "started": started,
            "finished": provenance.now(),
            "dtype": point.dtype,
            "threads": point.threads,
            "peers_missing": dict(missing),
        },
    )
    store.put(record)
    return record


def environments(root: Path) -> dict[str, str]:
    """Each peer's interpreter, or why there is none; the first call installs them."""
    done = subprocess.run(
        [sys.executable, str(root / "env" / "peers.py")], capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def tasks(point: Point, folder: Path) -> Iterator[tuple[dict[str, Any], list[list[int]]]]:
    """Every document and number of agents as JSON, with the full cache's answers, one an agent."""
    from polykv_lib import hf  # here, since tables of stored peers need no torch
    from polykv_lib.study.experiments.common import documents
    from polykv_lib.tasks.agents import questions

    model, tokenizer = hf.load_model(point.model, dtype=point.dtype)
    hf.export_model(model, folder)
    [text] = documents(tokenizer, n_docs=1, min_tokens=max(point.context_tokens))
    prompts = [hf.question_ids(tokenizer, question) for question in questions(3)]
    for n_tokens, n in product(point.context_tokens, point.n_agents):
        ids = hf.document_ids(tokenizer, text.text)[:, :n_tokens]
        cache = hf.full_cache(hf.read_document(model, ids), len(prompts))
        answers = hf.greedy(
            model, cache, prompts, n_seen=n_tokens, max_new_tokens=point.answer_tokens
        )
        task = {
            "model": str(folder),
            "dtype": point.dtype,
            "threads": point.threads,
            "document": ids[0].tolist(),
            "prompts": prompts,
            "n_agents": n,
            "answer_tokens": point.answer_tokens,
            "rounds": point.rounds,
            "keep": point.keep,
        }
        yield task, [answers[i % len(answers)] for i in range(n)]


def ask(root: Path, peer: str, python: str, task: Mapping[str, Any]) -> dict[str, Any]:
    """One process of a peer.

    Raises:
        RuntimeError: it failed; with its last words.
    """
    done = subprocess.run(
        [python, str(root / "env" / "peers" / f"{peer}.py")],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RuntimeError(f"peer {peer} failed: {words}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows_of(
    passes: Sequence[Mapping[str, Any]],
    reference: Sequence[Sequence[int]],
    at: Mapping[str, Any],
) -> Iterator[Row]:
    """Every method's medians over all passes; no time where the answers are wrong."""
    packages = passes[0]["packages"]
    version = ", ".join(f"{name} {version}" for name, version in packages.items())
    for method in passes[0]["methods"]:
        found = [one["methods"][method] for one in passes]
        dims = {**at, "method": method, "version": version, "threads": passes[0]["threads"]}
        equal = tokens_equal(reference, found[0]["answers"])
        yield _row("tokens_equal", equal, "share", dims, n=len(reference))
        if method not in EVICTING and equal < MIN_EQUAL:
            continue
        yield _row("held_bytes", found[0]["held_bytes"], "B", dims)
        for metric, unit in TIMES.items():
            ms = median_interval(list(chain.from_iterable(one[metric] for one in found)))
            yield _row(metric, ms.value, unit, dims, n=ms.n, lo=ms.lo, hi=ms.hi)
        rate = per_second(sum(map(len, reference)), ms)
        yield _row("tokens_per_s", rate.value, "1/s", dims, n=rate.n, lo=rate.lo, hi=rate.hi)


def tokens_equal(reference: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """Share of the reference's tokens before the first difference, over all answers."""
    same = 0
    for expected, answer in zip(reference, answers, strict=True):
        pairs = enumerate(zip(expected, answer, strict=False))
        shorter = min(len(expected), len(answer))
        same += next((i for i, (a, b) in pairs if a != b), shorter)
    return same / sum(map(len, reference))


def _row(
    metric: str, value: int | float | None, unit: str, dims: Mapping[str, Any], **more: Any
) -> Row:
    return Row(table="peers", metric=metric, value=value, unit=unit, dims=dict(dims), **more)
