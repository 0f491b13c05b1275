"""The native kernel is the plain path, shape by shape; without it everything still works."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from polykv_lib import native as compiled
from polykv_lib import presets
from polykv_lib.attend import SharedLayer, attend, attend_pieces, native, prepared, row_mask
from polykv_lib.attend.prepared import Prepared
from polykv_lib.kv import LayerKV
from polykv_lib.pool import freeze, load
from polykv_lib.quantize import Affine, FullPrecision, Int8, TurboQuant

needs_kernel = pytest.mark.skipif(
    native.status().startswith("off"), reason=f"native is {native.status()}"
)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def turning(tokens, dim):
    """What RoPE makes of a constant key: a harmonic in every pair of channels."""
    angles = torch.outer(torch.arange(tokens).double(), torch.logspace(0, -4, dim // 2).double())
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def pool_of(tokens, dim=64, heads=2, codec="polykv", dtype=torch.float32):
    chosen = presets.codec(codec)
    keys = draw(1, heads, tokens, dim) + turning(tokens, dim)
    values = draw(1, heads, tokens, dim, seed=1)
    layer = LayerKV(keys=keys.to(dtype), values=values.to(dtype))
    return freeze([layer], keys=chosen.keys, values=chosen.values, n_sink=chosen.n_sink)


def both(monkeypatch, pool, q, own=None):
    """Out and lse with the kernel, which must have been used, and without."""
    heads = pool.geometry.n_kv_heads
    found = []
    used = []
    call = native.attend
    with monkeypatch.context() as patch:
        patch.setattr(native, "attend", lambda *args: used.append(1) or call(*args))
        patch.setattr(prepared, "_is_faster", lambda *args: True)
        for switch in ("1", "0"):
            patch.setenv("POLYKV_NATIVE", switch)
            found.append(attend_pieces(q, pool.layers[0], heads, q.shape[-1] ** -0.5, own))
            assert len(used) == 1
    return found


def test_a_kernel_that_is_made_is_right():
    """Or every other test here would be skipped."""
    assert "differs" not in native.status()


def forget():
    for found in (compiled.functions, native._kernel, native._is_right):
        found.cache_clear()


@pytest.fixture(params=["AMX", "AVX-512"])
def instructions(request, monkeypatch):
    """The kernel with and without AMX; a CPU may have the latter alone."""
    if request.param == "AVX-512":
        monkeypatch.setenv("CC", os.environ.get("CC", "cc") + " -DNO_AMX")
    forget()
    if native.status() != f"on: {request.param}":
        pytest.skip(f"native is {native.status()}")
    yield
    monkeypatch.undo()
    forget()
    native.status()  # checked again here, not while a test counts its calls


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    "codec",
    ["paper", "polykv", "tq1", "tq2", "tq4", "tq1-both", "lean", "harmonic3+tq2", "harmonic2+tq2"],
)
@pytest.mark.parametrize(
    ("agents", "queries", "tokens", "dim"),
    [(1, 1, 5, 64), (5, 2, 64, 128), (7, 3, 333, 192), (16, 1, 640, 64), (3, 2, 200, 128)],
)
def test_it_is_the_plain_path(monkeypatch, codec, agents, queries, tokens, dim):
    pool = pool_of(tokens, dim, codec=codec)
    q, own = draw(agents, 6, queries, dim, seed=2), draw(agents, 6, queries, dim, seed=3)
    native_, plain = both(monkeypatch, pool, q, (own, draw(agents, 6, queries, seed=4) + 3))
    for got, want in zip(native_, plain, strict=True):
        assert_close(got, want, atol=5e-6, rtol=1e-5)
    out, _ = native_
    half, _ = both(monkeypatch, pool, q.bfloat16(), (own, draw(agents, 6, queries, seed=4) + 3))
    assert_close(half[0], out, atol=2e-2, rtol=2e-2)
    assert (half[0] - out).abs().max() > 1e-5, "bf16 is rounded, fp32 is not"


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("codec", ["full", "k-only", "v-only"])
@pytest.mark.parametrize(("tokens", "dim"), [(65, 64), (333, 128), (640, 192), (70, 256)])
def test_numbers_in_bf16_are_read_as_they_are(monkeypatch, codec, tokens, dim):
    pool = pool_of(tokens, dim, codec=codec, dtype=torch.bfloat16)
    q = draw(5, 6, 1, dim, seed=2).bfloat16()
    (out, lse), _ = both(monkeypatch, pool, q)
    wanted, wanted_lse = attend_pieces(q.float(), pool.layers[0], 2, dim**-0.5)
    assert_close(lse, wanted_lse, atol=5e-5, rtol=1e-5)
    _, (dense, _) = both(monkeypatch, pool, q)
    assert (out - wanted).abs().max() <= 1.2 * (dense - wanted).abs().max(), "no worse than torch"
    assert_close(out, wanted, atol=2e-2, rtol=2e-2)
    assert Prepared.of(pool.layers[0], 2, dim, torch.float32) is None


@needs_kernel
def test_the_answer_comes_from_the_codes(monkeypatch):
    """One code changed at the last token of a short block changes the answer alike on both paths."""
    pool = pool_of(70, codec="paper")
    q = draw(3, 6, 1, 64, seed=2)
    (before, _), _ = both(monkeypatch, pool, q)
    pool.layers[0][0].values.data.planes[0][0, -1, 3] ^= 7
    (after, _), (plain, _) = both(monkeypatch, pool, q)
    assert_close(after, plain, atol=5e-6, rtol=1e-5)
    assert (after - before).abs().max() > 1e-4


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("codec", ["polykv", "lean"])
def test_threads_change_nothing_but_rounding(monkeypatch, codec):
    pool, q = pool_of(3_000, heads=3, codec=codec), draw(5, 9, 1, 64, seed=2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, plain = both(monkeypatch, pool, q)
        torch.set_num_threads(4)
        four, _ = both(monkeypatch, pool, q)
    finally:
        torch.set_num_threads(threads)
    for got in (one, four):
        assert_close(got, plain, atol=5e-6, rtol=1e-5)
    assert not torch.equal(one[0], four[0]), "the tokens were not shared out"


@needs_kernel
def test_a_mapped_pool_is_read_where_it_lies(monkeypatch, tmp_path):
    pool = pool_of(1_001)
    mapped = load(pool.save(tmp_path / "a.pool"))
    q = draw(4, 6, 1, 64, seed=2)
    for got, want in zip(both(monkeypatch, mapped, q), both(monkeypatch, pool, q), strict=True):
        assert all(map(torch.equal, got, want))


@pytest.mark.usefixtures("instructions")
def test_queries_that_are_no_numbers_give_none_and_leave_the_others_alone(monkeypatch):
    pool, q = pool_of(100), draw(3, 6, 1, 64, seed=2)
    (right, _), _ = both(monkeypatch, pool, q)
    for wrong in (math.nan, math.inf):
        q[1, :, :, 5] = wrong
        (out, lse), _ = both(monkeypatch, pool, q)
        assert out[1].isnan().all()
        assert lse[1].isnan().all()
        assert_close(out[::2], right[::2])
    zero, plain = both(monkeypatch, pool, torch.zeros(3, 6, 1, 64))
    assert_close(zero, plain, atol=5e-6, rtol=1e-5)
    large, plain = both(monkeypatch, pool, q[::2] * 1e4)  # one token has all the weight
    assert_close(large, plain, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "values", "dim"),
    [
        (Int8("token"), TurboQuant(3), 64),
        (Affine(4, 64, "token"), TurboQuant(3), 64),
        (Int8(), Affine(4, 32, "channel"), 64),
        (Int8(), FullPrecision(), 64),
        (Int8(), TurboQuant(3), 80),
    ],
)
def test_what_it_cannot_read_is_left_to_torch(keys, values, dim):
    layer = LayerKV(keys=draw(1, 2, 70, dim), values=draw(1, 2, 70, dim, seed=1))
    [pieces] = freeze([layer], keys=keys, values=values, n_sink=0).layers
    assert Prepared.of(pieces, 2, dim, torch.float32) is None
    assert Prepared.of(pool_of(70).layers[0], 2, 64, torch.float64) is None


@pytest.mark.usefixtures("instructions")
def test_packed_keys_of_full_precision_queries_want_amx():
    pieces = pool_of(70, codec="lean").layers[0]
    used = Prepared.of(pieces, 2, 64, torch.float32) is not None
    assert used == (native.status() == "on: AMX")
    assert Prepared.of(pieces, 2, 64, torch.bfloat16) is not None


@needs_kernel
@pytest.mark.parametrize(
    "wrong", [{"scale": torch.ones(2, 69).half()}, {"planes": (torch.zeros(2, 70, 16),) * 2}]
)
def test_tensors_that_do_not_fit_are_refused(wrong):
    piece = pool_of(70, codec="paper").layers[0][0]
    data = replace(piece.values.data, **wrong)
    piece = replace(piece, values=replace(piece.values, data=data))
    with pytest.raises(ValueError, match="native attention wants a contiguous"):
        Prepared([piece], 2, 64, torch.float32)


def steps(monkeypatch, shared, q, keys, values, mask):
    """A decode step in one call, and by its parts in torch."""
    scale = q.shape[-1] ** -0.5
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "_is_faster", lambda *args: True)
        out = shared.step(q, keys, values, scale, mask)
        patch.setenv("POLYKV_NATIVE", "0")
        assert shared.step(q, keys, values, scale, mask) is None
        plain, lse = attend(q, keys, values, scale, mask)
        if shared.pieces:
            plain, _ = shared.attend(q, scale, (plain, lse))
    assert out is not None
    assert out.dtype == q.dtype
    return out, plain.transpose(1, 2)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("codec", ["paper", "polykv", "lean", "none"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("agents", "own", "dim", "group"), [(1, 1, 64, 3), (5, 17, 128, 7), (4, 40, 64, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_in_one_call_is_the_sum_of_its_parts(
    monkeypatch, codec, masked, agents, own, dim, group, dtype
):
    pieces = [] if codec == "none" else pool_of(300, dim, codec=codec).layers[0]
    q = draw(2 * group, agents, 1, dim, seed=2).transpose(0, 1).to(dtype)  # as RoPE leaves them
    room = draw(2, agents, 2, own + 3, dim, seed=3).to(dtype)  # a buffer with room behind them
    keys, values = room[:, :, :, :own]
    mask = None
    if masked:
        visible = draw(agents, 1, own, seed=4) > 0
        visible[0] = False  # an agent that sees only the document
        mask = row_mask(visible[:, None], group, dtype)
    shared = SharedLayer(pieces, 2)
    out, plain = steps(monkeypatch, shared, q, keys, values, mask)
    exact = dtype == torch.float32
    tolerance = {"atol": 5e-6, "rtol": 1e-5} if exact else {"atol": 2e-2, "rtol": 2e-2}
    assert_close(out.float(), plain, **tolerance)
    values[-1, :, -1] += 3 * values[-1].abs().amax()
    if mask is None:
        other, _ = steps(monkeypatch, shared, q, keys, values, mask)
        assert (other - out)[-1].abs().max() > 1e-3, "the newest token counts"
        assert torch.equal(other[:-1], out[:-1]), "and for its agent alone"


@needs_kernel
def test_heads_that_keep_different_tokens_are_read_in_one_call(monkeypatch):
    layer = LayerKV(keys=draw(1, 3, 300, 64), values=draw(1, 3, 300, 64, seed=1))
    kept = [[torch.arange(300), torch.arange(0, 300, 3), torch.arange(5, 100)]]
    chosen = presets.codec("polykv")
    pool = freeze([layer], keys=chosen.keys, values=chosen.values, n_sink=4, kept=kept)
    shared = SharedLayer(pool.layers[0], 3)
    q, keys = draw(5, 9, 1, 64, seed=2), draw(5, 3, 7, 64, seed=3)
    out, plain = steps(monkeypatch, shared, q, keys, keys, None)
    assert_close(out, plain, atol=5e-6, rtol=1e-5)
    swapped = SharedLayer(
        tuple(replace(p, heads=tuple(2 - h for h in p.heads)) for p in shared.pieces), 3
    )
    assert (steps(monkeypatch, swapped, q, keys, keys, None)[0] - out).abs().max() > 1e-2


@needs_kernel
def test_a_steps_numbers_that_are_none_stay_with_their_agent(monkeypatch):
    shared = SharedLayer(pool_of(100).layers[0], 2)
    q, keys, values = draw(3, 6, 1, 64), draw(3, 2, 9, 64, seed=1), draw(3, 2, 9, 64, seed=2)
    right, _ = steps(monkeypatch, shared, q, keys, values, None)
    for of in (q, keys, values):
        changed = of.clone()
        changed[1, :, -1, 5] = math.nan
        given = [changed if x is of else x for x in (q, keys, values)]
        out, _ = steps(monkeypatch, shared, *given, None)
        assert torch.equal(out[::2], right[::2])
        assert out[1].isnan().any()


def status_with(**changed: str) -> str:
    """`native.status()` of a fresh process."""
    code = "from polykv_lib.attend import native; print(native.status())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "POLYKV_NATIVE": "1", **changed},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.strip()


def test_without_a_compiler_or_a_folder_torch_computes(tmp_path):
    folder = {"XDG_CACHE_HOME": str(tmp_path)}
    assert status_with(POLYKV_NATIVE="0") == "off: POLYKV_NATIVE=0"
    missing = status_with(CC="no-such-compiler", **folder)
    assert missing.startswith("off: ")
    assert "no-such-compiler" in missing
    assert status_with(CC="false", **folder).startswith("off: ")
    assert not list(tmp_path.rglob("*.so"))


@needs_kernel
def test_another_cpu_gets_no_kernel_and_this_one_compiles_once(tmp_path):
    folder = {"XDG_CACHE_HOME": str(tmp_path)}
    old = status_with(CC="cc -mno-avx512f", **folder)
    assert old.startswith("off: CPU or compiler lacks AVX-512 F, BW")
    assert status_with(**folder).startswith("on")
    [library] = tmp_path.rglob("*.so")
    made = library.stat().st_mtime_ns
    assert status_with(**folder).startswith("on")
    assert [p.stat().st_mtime_ns for p in tmp_path.rglob("*.so")] == [made]
    assert list(library.parent.iterdir()) == [library]


@needs_kernel
def test_a_kernel_that_errs_is_not_used(monkeypatch):
    right = native.step
    native._is_right.cache_clear()
    try:
        monkeypatch.setattr(native, "step", lambda *args: right(*args) + 1e-3)
        assert native.status() == "off: it differs from the plain equation"
        pool = pool_of(70)
        assert attend_pieces(draw(1, 2, 1, 64), pool.layers[0], 2, 1 / 8)[0].isfinite().all()
    finally:
        native._is_right.cache_clear()
