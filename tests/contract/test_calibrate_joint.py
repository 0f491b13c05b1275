"""A plan of tokens and codecs from a few texts: within its bytes, and no worse than it says."""

import inspect

import pytest
import torch

import polykv_lib as pk
from polykv_lib import hf, presets
from polykv_lib.calibration import EncodedItem
from polykv_lib.evict import H2O, KeyDiff
from polykv_lib.metrics.agreement import kl_nats

POLICIES = (H2O(recent=0.0), KeyDiff())
NAMES = ("int8+tq3@0", "tq4+tq4@0", "tq2+tq2@0")
CODECS = {name: presets.codec(name) for name in NAMES}
N = 96


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def items(tokens):
    drawn = [tokens(1, N + 9, seed=seed)[0].tolist() for seed in range(2)]
    return [
        EncodedItem(
            id=f"a{i}", family="a",
            context_ids=tuple(ids[:N]), question_ids=tuple(ids[N : N + 5]),
            answer_ids=tuple(ids[N + 5 :]),
        )
        for i, ids in enumerate(drawn)
    ]  # fmt: skip


def pool_of(model, plan, ids):
    keys, values, n_sink = presets.of_plan(plan)
    return pk.build_pool(model, ids, plan=plan, keys=keys, values=values, n_sink=n_sink)


@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("share", [0.06, 0.15, 0.3])
def test_a_pool_takes_at_most_its_share(llama, words, items, level, share):
    plan = pk.calibrate_joint(
        llama, words, items, share=share, codecs=CODECS, level=level, policies=POLICIES
    )
    assert {layer.codec for layer in plan.layers} <= set(NAMES)
    ids = torch.tensor([items[0].context_ids])
    pool = pool_of(llama, plan, ids)
    one_copy = 2 * hf.geometry_of(llama.config).elements_per_token * N
    assert pool.nbytes <= share * one_copy
    assert pool.nbytes > 0.8 * share * one_copy, "and what it may take it takes"


def test_more_bytes_answer_closer_to_the_full_cache(llama, words, items):
    kl = []
    for share in (0.06, 0.15, 0.5):
        plan = pk.calibrate_joint(
            llama, words, items, share=share, codecs=CODECS, policies=POLICIES
        )
        found = []
        for item in items:
            ids, tail = torch.tensor([item.context_ids]), torch.tensor([item.tail_ids])
            full = hf.full_cache(hf.read_document(llama, ids))
            pool = pool_of(llama, plan, ids)
            logits = [hf.logits(llama, c, tail, N)[0] for c in (full, pool.agent_cache(1))]
            found.append(kl_nats(*logits).mean().item())
        kl.append(sum(found))
    assert kl[0] > 2 * kl[1] > 4 * kl[2] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"share": 0}, "share=0 of one bf16 copy; pass a number between 0 and 1"),
        ({"share": 1.5}, "share=1.5 of one bf16 copy"),
        ({"codecs": {}}, r"codecs=\{\}; pass at least one to choose from, by its name"),
        ({"codecs": ["lean"]}, r"codecs=\['lean'\]; pass at least one to choose from"),
        ({"texts": []}, r"texts=\[\]; pass a list of at least one text"),
        ({"share": 0.004}, "do not pay for"),
        (
            {"codecs": CODECS | {"polykv": presets.codec("polykv")}},
            r"the codecs leave \[0, 4\] first tokens in full precision",
        ),
    ],
)
def test_what_can_not_be_calibrated(llama, words, items, change, message):
    arguments = {"texts": items, "share": 0.25, "codecs": CODECS, "policies": POLICIES} | change
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(pk.calibrate_joint)(llama, words, **arguments)
