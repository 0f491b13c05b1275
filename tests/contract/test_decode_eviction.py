"""Eviction while generating: a cache that stays within its budget, against a masked full cache."""

import pytest
import torch
from torch.testing import assert_close

import polykv_lib as pk
from polykv_lib import hf
from polykv_lib.evict import (
    CAKE,
    CAM,
    D2O,
    H2O,
    TOVA,
    ExpectedAttention,
    FullKV,
    KeyDiff,
    KeyNorm,
    LayerPlan,
    Plan,
    Random,
    RankMerge,
    Scissorhands,
    SnapKV,
    StreamingLLM,
)  # fmt: skip
from polykv_lib.hf.build import held_cache
from polykv_lib.hf.compat import cache_argument, forward
from polykv_lib.pool import PoolError

DOCUMENT = 60
PIECES = [DOCUMENT, *[1] * 6, 7, *[1] * 4]  # a prompt, some tokens, a turn of seven, some tokens
EXACT = {"atol": 1e-5, "rtol": 0.0}
POLICIES = [
    StreamingLLM(), H2O(), TOVA(), SnapKV(window=4), CAKE(window=4), Scissorhands(window=16, recent=4),
    ExpectedAttention(window=16), KeyDiff(), KeyNorm(), Random(), RankMerge(first=H2O(), second=KeyDiff()),
    CAM(merged=8), D2O(),
]  # fmt: skip
MERGING = (CAM, D2O)
MIXED = Plan(
    layers=(
        LayerPlan(policy=H2O(), budget=(9, 31)),
        LayerPlan(policy=SnapKV(window=4), budget=(25, 7)),
    ),
    decode=(
        LayerPlan(policy=TOVA(), budget=(12, 28)),
        LayerPlan(policy=H2O(recent=0.25), budget=(25, 11)),
    ),
)


def cut(ids, lengths=PIECES):
    return list(ids.split(lengths, dim=1))


def run(model, plan, pieces, *, n_prefill=1):
    """Logits of each piece, what was held after it by layer and head, and the cache."""
    cache, seen, held, logits = hf.EvictingCache(model, plan), 0, {}, []
    for i, ids in enumerate(pieces):
        if i < n_prefill:
            cache.begin_prefill()
        logits.append(hf.logits(model, cache, ids, seen))
        cache.check()
        seen += ids.shape[1]
        assert cache.get_seq_length() == seen
        held[seen] = [cache.positions(layer) for layer in range(2)]
        changing = {type(p.policy) for p in (*plan.layers, *(plan.decode or ()))} & {*MERGING}
        if changing:  # their entries are no longer the full cache's
            for layer, heads in enumerate(held[seen]):
                [store] = cache.layers[layer].held
                sides = (store.keys[0], store.values[0])
                held[seen][layer] = [
                    (at, *(s[h].clone() for s in sides)) for h, at in enumerate(heads)
                ]
    return logits, held, cache


@pytest.mark.parametrize("budget", [16, 24], ids=["shrinks", "grows"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_every_policy_is_the_masked_full_cache(llama, tokens, replayed, policy, budget):
    pieces = cut(tokens(1, sum(PIECES)))
    plan = Plan.uniform(policy, 20, 2).decoding(policy, budget)
    logits, held, cache = run(llama, plan, pieces)
    assert cache.kept_per_head == ((budget,) * 2,) * 2
    assert cache.nbytes == 2 * 2 * budget * 2 * 16 * 4  # layers, heads; both sides, head_dim, fp32
    for ours, reference in zip(logits, replayed(llama, pieces, held), strict=True):
        assert_close(ours, reference, **EXACT)
    if not isinstance(policy, MERGING):
        for heads in (h for layers in held.values() for layer in layers for h in [*layer]):
            assert (heads.diff() > 0).all()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: type(p).__name__)
def test_one_prefill_serves_many_plans(llama, tokens, policy):
    """Caches made from what `evict_document` kept go on as those that evicted by themselves."""
    first, *later = cut(tokens(1, sum(PIECES)))
    plans = [Plan.uniform(policy, b, 2).decoding(policy, 16) for b in (12, 20)] + [MIXED]
    layers, kept = hf.evict_document(llama, first, plans)
    for plan, of_plan in zip(plans, kept, strict=True):
        alone = pk.prefill(llama, first, plan)
        made = held_cache(llama, plan, layers, of_plan)
        seen = DOCUMENT
        for ids in later:
            a, b = (hf.logits(llama, cache, ids, seen) for cache in (alone, made))
            assert_close(a, b, **EXACT)
            seen += ids.shape[1]
        for layer in range(2):
            for a, b in zip(alone.positions(layer), made.positions(layer), strict=True):
                assert torch.equal(a, b)


def test_mixed_layers_and_heads(model, tokens, replayed):
    pieces = cut(tokens(1, sum(PIECES)))
    logits, held, cache = run(model, MIXED, pieces)
    assert [len(h) for h in held[DOCUMENT][0]] == [9, 31]
    assert cache.kept_per_head == ((12, 28), (25, 11))
    for ours, reference in zip(logits, replayed(model, pieces, held), strict=True):
        assert_close(ours, reference, **EXACT)


@pytest.mark.parametrize("wrong", ["positions from the stored length", "a token more"])
def test_the_comparison_sees_what_is_wrong(llama, tokens, replayed, wrong):
    pieces = cut(tokens(1, sum(PIECES)))
    plan = Plan.uniform(H2O(), 20, 2).decoding(H2O(), 24)
    logits, held, _ = run(llama, plan, pieces)
    if wrong == "a token more":
        missing = set(range(DOCUMENT)) - set(held[DOCUMENT][0][0].tolist())
        held[DOCUMENT][0][0] = torch.cat([held[DOCUMENT][0][0], torch.tensor([min(missing)])])
    else:
        cache = hf.EvictingCache(llama, plan)
        logits = [hf.logits(llama, cache, ids, cache.layers[0].stored) for ids in pieces]
    reference = replayed(llama, pieces, held)
    errors = [(a - b).abs().max() for a, b in zip(logits, reference, strict=True)]
    assert errors[0] < 1e-5
    assert errors[1] > 1e-3


def test_h2o_sums_go_on_where_the_prefill_ended(llama, tokens, replayed):
    """The sums are those of the masked full cache's own weights, all steps together."""
    pieces, recent, budget = cut(tokens(1, sum(PIECES))), 5, 20
    plan = Plan.uniform(H2O(recent=recent / budget), budget, 2)
    plan = plan.decoding(H2O(recent=recent / budget), budget)
    _, held, _ = run(llama, plan, pieces)
    seen = 0
    for i, ids in enumerate(pieces):
        sums = {}
        replayed(llama, pieces[: i + 1], held, sums)
        before = held.get(seen, [[torch.arange(0)] * 2] * 2)
        new = torch.arange(seen, seen + ids.shape[1])
        seen += ids.shape[1]
        for layer in range(2):
            by_head = sums[layer].unflatten(0, (2, -1)).mean(1)
            for head in range(2):
                candidates = torch.cat([before[layer][head], new])
                old, newest = candidates[:-recent], candidates[-recent:]
                best = by_head[head, old].topk(budget - recent).indices.sort().values
                want = torch.cat([old[best], newest])
                assert torch.equal(held[seen][layer][head], want)


def test_sums_of_the_prompt_count_for_a_policy_that_starts_at_the_first_token(llama, tokens):
    pieces = cut(tokens(1, sum(PIECES)))
    same = [
        run(llama, Plan.uniform(first, DOCUMENT, 2).decoding(H2O(), 24), pieces)[1]
        for first in (FullKV(), H2O(), StreamingLLM())
    ]
    for other in same[1:]:
        assert all(
            torch.equal(a, b)
            for n in same[0]
            for x, y in zip(same[0][n], other[n], strict=True)
            for a, b in zip(x, y, strict=True)
        )


ALONE = [
    *(Plan.uniform(p, 20, 2).decoding(p, 22) for p in POLICIES if not isinstance(p, Random)),
    MIXED,
]


@pytest.mark.parametrize(
    ("plan", "side"),
    [*((p, "left") for p in ALONE), *((p, "right") for p in ALONE[-3:])],
    ids=lambda x: x if isinstance(x, str) else f"{x.decode[0].policy}",
)
def test_a_padded_row_is_the_row_alone(llama, tokens, plan, side):
    """Prompts of 60, 41 and 19 tokens, turns of 7, 1 and 4, then single tokens."""
    lengths = [(60, 7), (41, 1), (19, 4)]
    turns = [
        [tokens(1, n, seed=10 * r + i) for i, n in enumerate(row)] for r, row in enumerate(lengths)
    ]
    later = tokens(3, 5, seed=99)
    cache, mask = hf.EvictingCache(llama, plan), torch.zeros(3, 0, dtype=torch.long)
    batch = []
    for i, width in enumerate((60, 7)):
        ids = torch.zeros(3, width, dtype=torch.long)
        own = torch.zeros_like(ids)
        for r, row in enumerate(turns):
            n = row[i].shape[1]
            place = slice(width - n, width) if side == "left" else slice(0, n)
            ids[r, place], own[r, place] = row[i][0], 1
        mask = torch.cat([mask, own], 1)
        batch.append((feed(llama, cache, ids, mask), own.bool()))
    for t in range(5):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        batch.append((feed(llama, cache, later[:, t : t + 1], mask), torch.ones(3, 1).bool()))
    cache.check()
    for r, row in enumerate(turns):
        alone = hf.EvictingCache(llama, plan)
        seen = 0
        for ids, (logits, own) in zip([*row, *later[r : r + 1].split(1, 1)], batch, strict=True):
            assert_close(logits[r, own[r]], hf.logits(llama, alone, ids, seen)[0], **EXACT)
            seen += ids.shape[1]
        assert [len(h) for h in cache.positions(0, r)] == [len(h) for h in alone.positions(0)]


def feed(model, cache, ids, mask):
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return forward(model, ids, cache, position_ids=positions, attention_mask=mask).logits


def test_generate_is_our_greedy_loop(model, tokens):
    prompt = tokens(1, DOCUMENT)
    theirs = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), **{cache_argument(model): hf.EvictingCache(model, MIXED)},
        max_new_tokens=12, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    cache = hf.EvictingCache(model, MIXED)
    ours = hf.greedy(model, cache, prompt.tolist(), n_seen=0, max_new_tokens=12)
    assert theirs[:, DOCUMENT:].tolist() == ours
    assert cache.kept_per_head == ((12, 28), (25, 11))


def test_generate_goes_on_after_a_prefill_with_padded_rows(llama, tokens):
    ids, mask = tokens(2, DOCUMENT), torch.ones(2, DOCUMENT, dtype=torch.long)
    mask[1, :20] = 0
    own = tokens(2, 5, seed=1)
    cache = pk.prefill(llama, ids, MIXED, attention_mask=mask)
    assert cache.kept_per_head == ((9, 31), (25, 7))
    theirs = llama.generate(
        torch.cat([ids, own], 1), attention_mask=torch.cat([mask, torch.ones_like(own)], 1),
        **{cache_argument(llama): cache}, max_new_tokens=8, do_sample=False, pad_token_id=0,
    )[:, DOCUMENT + 5 :]  # fmt: skip
    for row, real in enumerate((slice(None), slice(20, None))):
        alone = pk.prefill(llama, ids[row : row + 1, real], MIXED)
        n_seen = DOCUMENT - (real.start or 0)
        [ours] = hf.greedy(
            llama, alone, own[row : row + 1].tolist(), n_seen=n_seen, max_new_tokens=8
        )
        assert theirs[row].tolist() == ours


def test_a_prompt_in_chunks(llama, tokens, replayed):
    """Held on the way: the budget and one chunk. A chunk evicts by its own queries; H2O's sums go on."""
    chunks = [16, 16, 16, 12]
    pieces = cut(tokens(1, sum(PIECES)), [*chunks, *PIECES[1:]])
    for plan in (MIXED, Plan.uniform(D2O(), 20, 2).decoding(CAM(), 20)):
        logits, held, _ = run(llama, plan, pieces, n_prefill=4)
        for ours, reference in zip(logits, replayed(llama, pieces, held), strict=True):
            assert_close(ours, reference, **EXACT)
        cache = pk.prefill(llama, torch.cat(pieces[:4], 1), plan, chunk=16)
        for layer in range(2):
            expected = [h[0] if isinstance(h, tuple) else h for h in held[DOCUMENT][layer]]
            assert all(map(torch.equal, cache.positions(layer), expected))


def test_the_prefill_is_the_pools(llama, tokens):
    """Same kept tokens as `build_pool`, and merged values are the pool's."""
    document = tokens(1, DOCUMENT)
    for policy in POLICIES:
        plan = Plan.uniform(policy, 20, 2)
        cache = pk.prefill(llama, document, plan.decoding(policy, 20))
        pool = pk.prefill(llama, document, plan)
        for layer, theirs in zip(cache.layers, pool.layers, strict=True):
            [piece], [held] = theirs.shared.pieces, layer.held
            assert torch.equal(piece.positions.long(), held.positions[0])
            assert_close(piece.values.dense(), held.values[0])
            assert_close(piece.keys.dense(), held.keys[0])


def test_beams_follow_their_rows(llama, tokens):
    """A beam's cache is that of its own history: the score of each beam is that of its tokens alone."""
    prompt = tokens(1, DOCUMENT)
    plan = Plan.uniform(SnapKV(window=4), 20, 2).decoding(H2O(), 22)
    found = llama.generate(
        prompt, attention_mask=torch.ones_like(prompt), **{cache_argument(llama): hf.EvictingCache(llama, plan)},
        max_new_tokens=6, num_beams=3, num_return_sequences=3, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_scores=True, length_penalty=0.0,
    )  # fmt: skip
    for sequence, score in zip(found.sequences, found.sequences_scores, strict=True):
        pieces = sequence[None].split([DOCUMENT, *[1] * 6], 1)
        logits, _, _ = run(llama, plan, pieces[:-1])
        steps = [
            step[0, -1].log_softmax(-1)[t]
            for step, t in zip(logits, sequence[DOCUMENT:], strict=True)
        ]
        assert_close(torch.stack(steps).sum(), score, atol=1e-4, rtol=0.0)


def test_without_a_decode_phase_the_cache_grows(llama, tokens):
    cache = run(llama, Plan.uniform(H2O(), 20, 2), cut(tokens(1, sum(PIECES))))[2]
    assert cache.kept_per_head == ((20 + sum(PIECES[1:]),) * 2,) * 2
    assert isinstance(pk.prefill(llama, tokens(1, 30), Plan.uniform(H2O(), 20, 2)), hf.AgentCache)


def test_refusals(llama, tiny_model, tokens):
    plan = Plan.uniform(H2O(), 20, 2).decoding(H2O(), 20)
    cache = hf.EvictingCache(llama, plan)
    llama.set_attn_implementation("sdpa")
    try:
        with pytest.raises(PoolError, match="did not read the cache, so nothing was evicted"):
            hf.logits(llama, cache, tokens(1, 30), 0)
        with pytest.raises(ValueError, match="which can not read a pool"):
            pk.prefill(llama, tokens(1, 30), plan)
    finally:
        pk.prepare(llama)
    cache = pk.prefill(llama, tokens(1, 30), plan)
    with pytest.raises(PoolError, match="can not be cropped"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match="the decode plan has 3 layers, the model 2"):
        hf.EvictingCache(llama, Plan(layers=plan.layers, decode=plan.layers[:1] * 3))
    windowed = tiny_model("Mistral", sliding_window=32)
    with pytest.raises(
        PoolError, match="has seen 33 tokens, but this model has layers with a window of 32"
    ):
        hf.logits(windowed, hf.EvictingCache(windowed, plan), tokens(1, 33), 0)


def test_a_run_in_which_nothing_was_evicted(llama, tokens):
    plan = Plan.uniform(H2O(), 20, 2).decoding(H2O(), 20)
    cache = pk.prefill(llama, tokens(1, 30), plan)
    layer = cache.layers[1]
    layer.held = [
        pk.prefill(llama, tokens(1, 30), Plan.uniform(H2O(), 30, 2), chunk=30).layers[1].held[0]
    ]
    with pytest.raises(
        PoolError, match="layer 1 holds 30 tokens in a head whose budget is 20: nothing was"
    ):
        cache.check()
