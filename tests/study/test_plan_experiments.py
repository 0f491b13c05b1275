from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from polykv_lib import hf, presets
from polykv_lib.calibration import EncodedItem
from polykv_lib.evict import H2O, Plan
from polykv_lib.kv import LayerKV
from polykv_lib.metrics.intervals import stratified
from polykv_lib.study.experiments import (
    plan_ablations,
    plan_recovery,
)
from polykv_lib.study.experiments.eviction import choice, scores
from polykv_lib.study.experiments.eviction import items as eviction_items
from polykv_lib.study.experiments.eviction.items import (
    POLICIES,
    Asked,
    Wanted,
    check_disjoint,
    continuation,
    encoded,
    single,
)
from polykv_lib.study.experiments.eviction.phases import long_answers, quotation
from polykv_lib.study.experiments.eviction.scores import bytes_in_bf16, check_evicted
from polykv_lib.study.record import Outcome, Row
from polykv_lib.tasks import ruler
from polykv_lib.tasks.base import Item

pytestmark = pytest.mark.usefixtures("tiny")
TASKS = ["niah_multikey_2", "fwe"]  # generated: no articles are read


def silent(text: str) -> None:
    assert "\n" not in text


def found(outcome: Outcome, table: str, metric: str, **dims: object) -> list[Row]:
    return [
        row
        for row in outcome.rows
        if (row.table, row.metric) == (table, metric) and row.dims.items() >= dims.items()
    ]


SHARED = {
    "MODEL": "tiny",
    "SEED": 0,
    "SUITE": "ruler",
    "TASKS": TASKS,
    "N_ITEMS": 2,
    "N_CALIBRATION": 1,
    "CONTEXT_TOKENS": 900,
    "QUESTION": "hidden",
    "CANDIDATES": ["H2O", "KeyDiff"],
    "N_BOOT": 100,
}
RECOVERY = SHARED | {
    "LONGBENCH_DIR": "",
    "KEEP": [0.25, 0.5],
    "POLICIES": ["H2O", "StreamingLLM", "PyramidKV"],
    "PLANS": ["paper-b", "gain-curve", "gain-curve-heads"],
    "CODECS": ["full", "polykv"],
    "MAX_NEW_TOKENS": 3,
}
MADE = {"paper-b", "paper-b, ppl budgets", "gain-curve", "gain-curve-heads"}
CONTROLS = {"best single, our budgets", "ours, budgets shuffled"}


@pytest.fixture(scope="module")
def recovery(tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]) -> Outcome:
    return in_parts(plan_recovery.run, RECOVERY)


def of_budget(outcome: Outcome, what: str, keep: float) -> Any:
    named: Any = outcome.protocol[what]
    return named[str(keep)]


def test_every_method_has_its_numbers_by_family_and_over_all(recovery: Outcome) -> None:
    methods = {"FullKV", *RECOVERY["POLICIES"], *MADE, *CONTROLS, "ours"}
    for keep in (0.25, 0.5):
        for family, n in (*((task, 2) for task in TASKS), ("macro", 4)):
            kl = found(recovery, "recovery", "kl_nats", keep=keep, family=family, codec="full")
            assert {row.dims["method"] for row in kl} == methods
            for row in kl:
                assert row.n == n
                assert row.lo is not None
                assert row.hi is not None
                assert row.lo - 1e-9 <= row.value <= row.hi + 1e-9
    roles = {row.dims["method"]: row.dims["role"] for row in recovery.rows if "codec" in row.dims}
    assert roles["FullKV"] == "full cache"
    assert roles["PyramidKV"] == "single", "its budgets are not uniform"
    assert {m for m, role in roles.items() if role == "plan"} == {*MADE, "ours"}
    assert {m for m, role in roles.items() if role == "control"} == CONTROLS


def test_macro_means_are_means_of_families(recovery: Outcome) -> None:
    for metric in ("kl_nats", "nll_delta_nats", "exact"):
        where = {"method": "gain-curve", "keep": 0.25, "codec": "full"}
        each = [found(recovery, "recovery", metric, family=f, **where)[0].value for f in TASKS]
        [macro] = found(recovery, "recovery", metric, family="macro", **where)
        assert macro.value == pytest.approx(np.mean(each))


def test_the_gap_is_measured_from_the_best_single_policy_to_the_full_cache(
    recovery: Outcome,
) -> None:
    for keep in (0.25, 0.5):
        best = of_budget(recovery, "best_single", keep)
        where = {"keep": keep, "family": "macro", "codec": "full"}
        [base] = found(recovery, "recovery", "kl_nats", method=best, **where)
        assert base.dims["role"] == "best single"
        [own] = found(recovery, "recovery", "kl_nats", method="paper-b", **where)
        for method, gap in (
            (best, 0),
            ("FullKV", 100),
            ("paper-b", 100 * (1 - own.value / base.value)),
        ):
            [row] = found(recovery, "recovery", "gap_recovered_pct", method=method, **where)
            assert row.value == pytest.approx(gap, abs=1e-3)


def test_all_methods_keep_equally_many_tokens(recovery: Outcome) -> None:
    kept: dict[tuple[object, object], set[object]] = {}
    for sample in recovery.samples:
        if sample["method"] != "FullKV":
            kept.setdefault((sample["item"], sample["keep"]), set()).add(sample["n_kept"])
    assert len(kept) == 2 * 4
    assert all(len(counts) == 1 for counts in kept.values())


def test_free_answers_and_further_codecs_are_the_finalists(recovery: Outcome) -> None:
    for keep in (0.25, 0.5):
        rows = found(recovery, "recovery", "score", family="macro", keep=keep)
        best, ours = (of_budget(recovery, what, keep) for what in ("best_single", "ours"))
        own = ours if ours in {best, *MADE} else "best single, our budgets"
        assert {row.dims["method"] for row in rows} == {"FullKV", "ours", own, best}
        sizes = found(recovery, "quality_bytes", "memory_ratio", keep=keep)
        ratio = {(row.dims["method"], row.dims["codec"]): row.value for row in sizes}
        assert ratio["FullKV", "full"] == pytest.approx(1, abs=0.02)
        assert ratio["ours", "full"] == pytest.approx(1 / keep, rel=0.05)
        assert ratio["ours", "polykv"] > 1.9 * ratio["ours", "full"]
        assert {codec for method, codec in ratio if method == "PyramidKV"} == {"full"}


def test_ours_is_what_held_out_calibration_items_chose(recovery: Outcome) -> None:
    for keep in (0.25, 0.5):
        best, ours = (of_budget(recovery, what, keep) for what in ("best_single", "ours"))
        rows = found(recovery, "choice", "kl_nats", keep=keep)
        kl = {row.dims["method"]: row.value for row in rows}
        names = {"gain-curve", "gain-curve-heads"}
        assert set(kl) == {best, *names, *(f"best single, {name} budgets" for name in names)}
        assert [r.dims["method"] for r in rows if r.dims["role"] == "chosen"] == [ours]
        assert kl == pytest.approx(of_budget(recovery, "held_out_macro_kl", keep), abs=1e-6)
        assert kl[ours] == min(kl.values())
        alias = ours if ours in {best, *MADE} else "best single, our budgets"
        for row in found(recovery, "recovery", "kl_nats", keep=keep, method="ours"):
            [same] = found(recovery, "recovery", "kl_nats", **row.dims | {
                "method": alias, "role": "best single" if alias == best else "control"
                if alias not in MADE else "plan"})  # fmt: skip
            assert row.value == same.value


def test_regrets_are_paired_differences_by_family(recovery: Outcome) -> None:
    for row in found(recovery, "regret", "kl_over_nats"):
        where = {name: row.dims[name] for name in ("keep", "family")} | {"codec": "full"}
        against = str(row.dims["against"])
        if against == "best single":
            against = of_budget(recovery, "best_single", where["keep"])
        [own] = found(recovery, "recovery", "kl_nats", method=row.dims["method"], **where)
        [base] = found(recovery, "recovery", "kl_nats", method=against, **where)
        assert row.value == pytest.approx(own.value - base.value, abs=1e-12)
        assert row.n == own.n
    compared = {
        (r.dims["method"], r.dims["against"]) for r in found(recovery, "regret", "kl_over_nats")
    }
    assert compared == {
        *((name, "best single") for name in (*MADE, "ours")),
        *(("ours", control) for control in CONTROLS),
    }


def test_one_calibration_item_holds_nothing_out(tiny: tuple[Any, Any]) -> None:
    outcome = plan_recovery.run(
        RECOVERY | {"TASKS": TASKS[1:], "KEEP": [0.25], "N_ITEMS": 1, "MAX_NEW_TOKENS": 0}, silent
    )
    assert of_budget(outcome, "ours", 0.25) == of_budget(outcome, "best_single", 0.25)
    regrets = found(outcome, "regret", "kl_over_nats", method="ours", against="best single")
    assert [row.value for row in regrets] == [0, 0]


def test_halves_hold_out_every_item_once_and_every_family_twice() -> None:
    def item(name: str) -> EncodedItem:
        return EncodedItem(
            id=name, family=name[0], context_ids=(1,), question_ids=(1,), answer_ids=(1,)
        )

    def names(*given: str) -> list[tuple[str, str]]:
        halves = choice._halves([item(name) for name in given])
        return [(" ".join(i.id for i in own), " ".join(i.id for i in rest)) for own, rest in halves]

    assert names("a0", "a1", "b0", "b1") == [("a0 b0", "a1 b1"), ("a1 b1", "a0 b0")]
    assert names("a0", "b0", "c0") == [("a0 c0", "b0"), ("b0", "a0 c0")]
    assert names("a0") == []


def test_a_plan_has_a_row_a_layer_and_equal_totals(recovery: Outcome) -> None:
    for method in MADE:
        rows = found(recovery, "plan", "budget", method=method, keep=0.25)
        tokens = rows[0].dims["context_tokens"]
        assert isinstance(tokens, int)
        assert [row.dims["layer"] for row in rows] == [0, 1]
        assert sum(row.value for row in rows) == pytest.approx(2 * round(0.25 * tokens))
        assert {row.dims["policy"] for row in rows} <= set(POLICIES)


def test_what_was_hidden_and_calibrated_on_is_recorded(recovery: Outcome) -> None:
    assert recovery.protocol["question_visible_when_compressing"] is False
    calibrated = recovery.protocol["calibration_items"]
    assert isinstance(calibrated, list)
    assert not set(calibrated) & {s["item"] for s in recovery.samples}  # type: ignore[arg-type]


def test_bytes_are_those_of_a_pool_built_in_bf16(tiny: tuple[Any, Any]) -> None:
    model, _ = tiny
    ids = torch.arange(3, 63)[None]
    plan = Plan.of(H2O(), [(20, 30), 10])
    layers, [kept] = hf.evict_document(model, ids, [plan])
    halves = [LayerKV(keys=a.keys.bfloat16(), values=a.values.bfloat16()) for a in layers]
    for name in ("full", "polykv", "paper-sinks", "int8"):
        codec = presets.codec(name)
        sides = {"keys": codec.keys, "values": codec.values, "n_sink": codec.n_sink}
        for tokens in (None, kept):
            pool, half = (
                hf.share(model, own, ids, kept=tokens, **sides) for own in (layers, halves)
            )
            assert bytes_in_bf16(pool) == bytes_in_bf16(half) == half.nbytes
            assert pool.nbytes > half.nbytes or name == "int8"


ABLATIONS = SHARED | {
    "KEEP": 0.25,
    "N_SHUFFLES": 4,
    "N_BUDGET_SHUFFLES": 3,
    "PHASE_TASKS": ["niah_multikey_2"],
}


@pytest.fixture(scope="module")
def ablations(tiny: tuple[Any, Any], in_parts: Callable[..., Outcome]) -> Outcome:
    return in_parts(plan_ablations.run, ABLATIONS)


def test_each_signal_has_its_opposite_and_every_part_its_row(ablations: Outcome) -> None:
    rows = found(ablations, "ablations", "kl_nats")
    lines = [(r.dims["varied"], r.dims["signal"], r.dims["direction"]) for r in rows]
    assert len(set(lines)) == len(lines)
    for direction in ("forward", "inverse"):
        for signal in ("cosine", "ppl", "error"):
            assert ("policies", signal, direction) in lines
        for signal in ("entropy", "ppl", "curve", "gain_curve"):
            assert ("budgets", signal, direction) in lines
    ours = "error + gain_curve"
    for varied in ("both", "both, head budgets", "both, calibrated on no retrieval"):
        assert (varied, ours, "forward") in lines
    assert ("policies", "cosine", "4 shuffles, mean") in lines


def test_differences_are_paired_with_the_single_policy(ablations: Outcome) -> None:
    [base] = found(ablations, "ablations", "kl_nats", varied="single")
    assert base.dims["signal"] == ablations.protocol["best_single"]
    for row in found(ablations, "ablations", "kl_nats"):
        [over] = found(ablations, "ablations", "kl_over_single_nats", **row.dims)
        assert over.value == pytest.approx(row.value - base.value)


def test_shuffles_are_ranked_and_averaged(ablations: Outcome) -> None:
    of: dict[object, list[Any]] = {}
    for sample in ablations.samples:
        of.setdefault(sample["plan"], []).append(sample["kl"])
    # Families are equally large.
    own = np.mean(of["budgets by gain_curve, forward at prefill"])
    drawn = np.mean(of["budgets by gain_curve, shuffles"], axis=0).tolist()
    assert len(drawn) == 3
    [rank] = found(ablations, "ablations", "rank_among_shuffles", varied="budgets")
    assert (rank.value, rank.n) == (1 + sum(m < own for m in drawn), 4)
    [mean] = found(
        ablations, "ablations", "kl_nats", varied="budgets", direction="3 shuffles, mean"
    )
    assert mean.value == pytest.approx(np.mean(drawn), abs=1e-5)


def test_each_phase_has_its_signals_and_its_own_single_policy(ablations: Outcome) -> None:
    rows = found(ablations, "phases", "kl_nats")
    lines = {(r.dims["phase"], r.dims["signal"], r.dims["direction"]): r.value for r in rows}
    best = ablations.protocol["best_single"]
    for phase in ("prefill", "decode", "both"):
        assert lines[phase, best, "uniform"] > 0
        for signal in ("cosine", "ppl"):
            for direction in ("forward", "inverse"):
                assert (phase, signal, direction) in lines
    assert len(lines) == 3 * 5
    assert len({lines[phase, best, "uniform"] for phase in ("prefill", "decode", "both")}) == 3
    for row in found(ablations, "phases", "kl_over_single_nats"):
        base = lines[row.dims["phase"], best, "uniform"]
        own = lines[row.dims["phase"], row.dims["signal"], row.dims["direction"]]
        assert row.value == pytest.approx(own - base)


def test_a_quotation_goes_on_in_the_context(tiny: tuple[Any, Any]) -> None:
    item = asked(tiny[1]).encoded
    own = quotation(item)
    passage = own.question_ids + own.answer_ids
    start = len(item.context_ids) // 3
    assert passage == item.context_ids[start : start + 60]
    assert own.id != item.id
    one_token = replace(item, answer_ids=item.answer_ids[:1])
    pairs = [Asked(item=asked(tiny[1]).item, encoded=e) for e in (item, one_token)]
    assert [i.family for i in long_answers(pairs)] == ["fwe", "quotation"]


def test_the_visible_question_is_read_before_the_eviction(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    wanted = Wanted(
        suite="ruler",
        tasks=["fwe"],
        n_calibration=1,
        n_items=1,
        context_tokens=900,
        question="hidden",
        seed=0,
    )
    [hidden], [visible] = (
        wanted.both(tokenizer)[1],
        replace(wanted, question="visible").both(tokenizer)[1],
    )
    assert hidden.item == visible.item
    assert len(visible.encoded.question_ids) == 1
    whole = hidden.encoded.context_ids + hidden.encoded.question_ids
    assert visible.encoded.context_ids + visible.encoded.question_ids == whole


def asked(tokenizer: Any, **changes: Any) -> Asked:
    [item] = ruler.items("fwe", n=1, length=900, count_tokens=len)
    item = replace(item, **changes)
    return Asked(item=item, encoded=encoded(tokenizer, item))


def test_a_conversation_is_well_formed_and_a_bare_prompt_is_bare(tiny: tuple[Any, Any]) -> None:
    _, tokenizer = tiny
    chat = {
        "context": "Text.",
        "question": "\n\nWho?",
        "answer_prefix": "It is ",
        "answers": ("A",),
    }
    own = asked(tokenizer, **chat).encoded
    text = [tokenizer.decode(ids) for ids in (own.context_ids, own.question_ids, own.answer_ids)]
    assert text == ["<s>user\nText.", "\n\nWho?</s>\n<s>assistant\nIt is", " A"]
    own = asked(tokenizer, chat_template=False, **chat).encoded
    assert tokenizer.decode(own.context_ids + own.question_ids) == "Text.\n\nWho?It is"


@pytest.mark.parametrize(
    ("prefix", "answers", "metric", "expected"),
    [
        ("", ("A b",), "qa_f1", ("", "A b")),
        ("They are:", ("a", "b"), "string_match_all", ("They are:", " a, b")),
        ("First or", ("a", "b"), "string_match_part", ("First or", " a")),
        ("Said. [Paragraph", ("Paragraph 5",), "retrieval", ("Said. [Paragraph", " 5")),
    ],
)
def test_the_reference_goes_on_from_the_prefix(
    prefix: str, answers: tuple[str, ...], metric: str, expected: tuple[str, str]
) -> None:
    [item] = ruler.items("fwe", n=1, length=900, count_tokens=len)
    changed: Item = replace(item, answer_prefix=prefix, answers=answers, metric=metric)
    assert continuation(changed) == expected


def test_calibration_and_test_share_no_text(tiny: tuple[Any, Any]) -> None:
    one = asked(tiny[1])
    other = asked(tiny[1], id="other", context="other")
    check_disjoint([one], [other])
    for same in (
        replace(other.item, id=one.item.id),
        replace(other.item, context=one.item.context),
    ):
        with pytest.raises(RuntimeError, match="scored on what they were made from"):
            check_disjoint([one], [replace(other, item=same)])


def test_longbench_is_calibrated_on_the_offline_suite(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    [item] = ruler.items("fwe", n=1, length=900, count_tokens=len)
    tasks: list[str] = []

    def offline(task: str, **rest: Any) -> list[Item]:
        tasks.append(task)
        assert rest["split"] == "calibration"
        return [replace(item, id=f"c/{task}", context=f"own {task}")]

    def records(task: str, *, n: int, folder: object) -> list[Item]:
        assert (task, n, folder) == ("qasper", 2, None)
        return [item]

    monkeypatch.setattr(eviction_items.offline_suite, "items", offline)
    monkeypatch.setattr(eviction_items.longbench, "items", records)
    wanted = Wanted(
        suite="longbench",
        tasks=["qasper"],
        n_calibration=1,
        n_items=2,
        context_tokens=400,
        question="hidden",
        seed=0,
    )
    calibration, [test] = wanted.both(tiny[1])
    assert tasks == list(eviction_items.offline_suite.TASKS)
    assert len(calibration) == len(tasks)
    assert len(item.prompt) > 400, "longer than asked for, so its middle is left out"
    assert len(test.item.prompt) == 400


def test_a_run_in_which_nothing_was_evicted_is_an_error() -> None:
    check_evicted("x", 100, {"a": 25, "b": 25})
    with pytest.raises(RuntimeError, match="nothing of 'x' was evicted by b"):
        check_evicted("x", 100, {"a": 25, "b": 100})
    with pytest.raises(RuntimeError, match="different totals of 'x'"):
        check_evicted("x", 100, {"a": 25, "b": 26})


def test_pyramid_spends_what_a_uniform_policy_does() -> None:
    for n_tokens in (160, 641):
        totals = {name: single(name, 0.25, 30)(n_tokens).total(3) for name in ("H2O", "PyramidKV")}
        assert len(set(totals.values())) == 1


def test_items_are_resampled_inside_families_and_pairs_stay_together() -> None:
    first = np.array([[1.0, 2.0], [3.0, 6.0]])
    second = np.array([[10.0, 20.0], [10.0, 20.0], [10.0, 20.0]])
    sampling: dict[str, Any] = {"seed": 0, "n_resamples": 500}
    mean = stratified([first, second], lambda m: m[..., 0], **sampling)
    assert (mean.value, mean.lo, mean.hi, mean.n) == (6, 5.5, 6.5, 5)
    ratio = stratified([first, second], lambda m: m[..., 0] / m[..., 1], **sampling)
    assert (ratio.value, ratio.lo, ratio.hi) == (0.5, 0.5, 0.5)
    alone = stratified([first, second[:1]], lambda m: m[..., 0], **sampling)
    assert (alone.value, alone.lo, alone.hi) == (6, None, None)


def test_answers_end_where_their_task_says(
    tiny: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny
    ids = tokenizer("\nname\nmore", add_special_tokens=False)["input_ids"]
    limits = []

    def greedy(*_: Any, max_new_tokens: int, **rest: Any) -> list[list[int]]:
        limits.append(max_new_tokens)
        return [ids]

    monkeypatch.setattr(hf, "greedy", greedy)
    for stops, limit, expected in ((False, 9, "\nname\nmore"), (True, 100, "\nname")):
        own = asked(tokenizer, stop_at_newline=stops, max_new_tokens=50)
        assert scores.generate(model, tokenizer, own, None, limit) == expected
    assert limits == [9, 50]
