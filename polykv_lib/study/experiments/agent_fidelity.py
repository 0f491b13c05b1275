"""Do agents that read a compressed document answer as they would have?

All agents of a document answer in one batch, greedily, through the chat template. The reference is
the same model's answer over the full-precision cache: this measures agreement, not correctness. Two
controls say what agreement is worth: agents that read another document, and agents that read none.

The largest batch is run, and smaller ones are its first agents, as no row of a batch depends on
another. The smallest batch is run again, and the share of its answers that are the same is stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from jaxtyping import Int
from torch import Tensor

from polykv_lib import hf
from polykv_lib.metrics.bertscore import BertScores, load_scorer
from polykv_lib.metrics.intervals import Interval, mean_interval
from polykv_lib.metrics.scorers import exact_match, n_empty, token_overlap
from polykv_lib.study.experiments.common import (
    CORPUS,
    Say,
    Timer,
    documents,
    facts,
    row,
    settings,
)
from polykv_lib.study.experiments.readers import readers
from polykv_lib.study.parts import part
from polykv_lib.study.record import Outcome, Row
from polykv_lib.tasks.agents import questions


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One point; `n_agents` and `context_tokens` are crossed."""

    model: str
    seed: int
    n_agents: Sequence[int]
    context_tokens: Sequence[int]
    n_docs: int
    codecs: Sequence[str]
    max_new_tokens: int
    encoder: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """One document, and the unrelated one of its control."""

    title: str
    document: Int[Tensor, "1 token"]
    stranger: Int[Tensor, "1 token"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One agent's answer beside its reference."""

    control: str
    codec: str
    context_tokens: int
    agent: int
    document: str
    question: str
    reference: str
    answer: str
    nll_delta_nats: float | None  # of the reference's tokens; None where it has none
    same_in_small_batch: float | None  # 0 or 1; None where the smallest batch has no such agent

    @property
    def setting(self) -> tuple[int, str, str]:
        """What a mean is taken within, beside the number of agents."""
        return self.context_tokens, self.control, self.codec


def run(params: Mapping[str, Any], say: Say) -> Outcome:
    """Agreement of the agents' answers with those over the full-precision cache."""
    timer, point = Timer(), settings(Settings, params)
    model, tokenizer = hf.load_model(point.model)
    scorer = load_scorer(point.encoder, device=str(model.device))
    tasks = list(_tasks(tokenizer, point))
    given: list[Answer] = []
    for i, task in enumerate(tasks):
        given += part(f"document-{i}", list, answers(model, tokenizer, task, point))
        say(
            f"agents on {task.document.shape[1]:,} tokens of {task.title}, "
            f"document {i + 1} of {len(tasks)}, {timer.seconds:.0f} s"
        )
    scores = scorer.score([a.answer for a in given], [a.reference for a in given])
    start = tasks[0].document[0, :2] == tokenizer.bos_token_id
    return Outcome(
        rows=list(rows(given, scores, point)),
        samples=[_sample(a, f1) for a, f1 in zip(given, scores.f1, strict=True)],
        protocol={
            **facts(model, tokenizer),
            "chat_template": tokenizer.chat_template is not None,
            "document_start": tokenizer.decode(tasks[0].document[0, :24]),
            "begins_with_bos": bool(start[0]),
            "bos_doubled": bool(start.all()),
            "truncation": "documents are cut at the token count, mid-sentence",
            "question_visible_when_compressing": False,
            "decoding": f"greedy, up to {point.max_new_tokens} tokens, all agents in one batch",
            "encoder": scores.encoder,
            "layer": scores.layer,
            "rescaled": scores.rescaled,
            "texts_past_the_encoders_window": scores.n_cut,
            "interval": "percentile bootstrap over documents",
            "seconds": timer.seconds,
        },
    )


def _tasks(tokenizer: Any, point: Settings) -> Iterator[Task]:
    texts = documents(tokenizer, n_docs=point.n_docs + 1, min_tokens=max(point.context_tokens))
    for n_tokens in point.context_tokens:
        ids = [hf.document_ids(tokenizer, text.text)[:, :n_tokens] for text in texts]
        for text, document, stranger in zip(texts, ids, ids[1:], strict=False):
            yield Task(title=text.title, document=document, stranger=stranger)


def answers(model: Any, tokenizer: Any, task: Task, point: Settings) -> Iterator[Answer]:
    """The agents' answers from every pool and control, each beside that from the full cache."""
    few, n = min(point.n_agents), max(point.n_agents)
    asked = questions(n)
    full, *others = readers(model, tokenizer, task.document, task.stranger, asked, point.codecs)
    limits = point.max_new_tokens, hf.stop_ids(tokenizer, model.generation_config.eos_token_id)
    references = full.answer(model, n, *limits)
    full_nll = [full.nll(model, i, reference) for i, reference in enumerate(references)]
    for reader in others:
        given = reader.answer(model, n, *limits)
        again = reader.answer(model, few, *limits) if few < n else []
        for i, (reference, answer) in enumerate(zip(references, given, strict=True)):
            before, after = full_nll[i], reader.nll(model, i, reference)
            yield Answer(
                control=reader.control,
                codec=reader.codec,
                context_tokens=task.document.shape[1],
                agent=i + 1,
                document=task.title,
                question=asked[i],
                reference=_text(tokenizer, reference),
                answer=_text(tokenizer, answer),
                nll_delta_nats=None if before is None or after is None else after - before,
                same_in_small_batch=float(answer == again[i]) if i < len(again) else None,
            )


def _text(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text.strip()


def rows(given: Sequence[Answer], scores: BertScores, point: Settings) -> Iterator[Row]:
    """Means over the agents of each setting, with intervals over its documents."""
    scored: dict[tuple[int, str, str], list[tuple[Answer, float]]] = {}
    for answer, f1 in zip(given, scores.f1, strict=True):
        scored.setdefault(answer.setting, []).append((answer, f1))
    for n_agents in point.n_agents:
        for setting, pairs in scored.items():
            first = [(a, f1) for a, f1 in pairs if a.agent <= n_agents]
            yield from _setting_rows(setting, n_agents, first, scores, point)


def _setting_rows(
    setting: tuple[int, str, str],
    n_agents: int,
    pairs: Sequence[tuple[Answer, float]],
    scores: BertScores,
    point: Settings,
) -> Iterator[Row]:
    context_tokens, control, codec = setting
    dims = {
        "model": point.model,
        "text": CORPUS,
        "context_tokens": context_tokens,
        "n_agents": n_agents,
        "control": control,
        "codec": codec,
        "encoder": scores.encoder,
        "layer": scores.layer,
        "rescaled": scores.rescaled,
    }
    own = [a for a, _ in pairs]
    values: dict[str, tuple[str, list[float | None]]] = {
        "bertscore_f1": ("F1", [f1 for _, f1 in pairs]),
        "token_overlap": ("share", [token_overlap(a.answer, a.reference) for a in own]),
        "exact_match": ("share", [exact_match(a.answer, a.reference) for a in own]),
        "nll_delta_nats": ("nats", [a.nll_delta_nats for a in own]),
        "same_in_small_batch": ("share", [a.same_in_small_batch for a in own]),
    }
    for metric, (unit, numbers) in values.items():
        mean = _mean_over_documents([a.document for a in own], numbers, point.seed)
        yield row("fidelity", metric, mean, unit, dims)
    empty = n_empty([a.answer for a in own], [a.reference for a in own])
    yield row("fidelity", "n_empty", empty, "answers", dims, n=len(own))


def _mean_over_documents(
    titles: Sequence[str], numbers: Sequence[float | None], seed: int
) -> Interval | None:
    """Agents of one document are averaged first: they share it, so they are not independent."""
    of: dict[str, list[float]] = {}
    for title, number in zip(titles, numbers, strict=True):
        if number is not None:
            of.setdefault(title, []).append(number)
    return mean_interval([fmean(own) for own in of.values()], seed=seed) if of else None


def _sample(answer: Answer, f1: float) -> dict[str, Any]:
    nll = answer.nll_delta_nats
    return asdict(answer) | {
        "nll_delta_nats": None if nll is None else round(nll, 4),
        "bertscore_f1": round(f1, 4),
        "token_overlap": round(token_overlap(answer.answer, answer.reference), 4),
        "exact_match": exact_match(answer.answer, answer.reference),
    }
