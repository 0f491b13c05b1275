"""Records made up by formula: they have the shape of real ones and the profile "synthetic"."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polykv_lib.study.parts import Parts, keeping
from polykv_lib.study.record import Outcome, Record, Row
from polykv_lib.study.store import Store

MODEL = "smollm2-135m"
BITS = {
    "full": 16.0,
    "paper": 5.6,
    "polykv": 5.7,
    "int8": 8.1,
    "tq2": 5.1,
    "tq4": 6.1,
    "k-only": 12.0,
}
GEOMETRIES = {"smollm2-135m": 11_520, "llama-3-8b": 65_536, "qwen2.5-7b": 28_672}
CONTROLS = {
    "paper": 0.1,
    "paper-plain": 0.2,
    "v-gaussian": 0.0,
    "v-shrunk": 0.3,
    "temperature-1.05": -0.4,
}
AGENTS = (1, 3, 5, 10, 15)


def _row(table: str, metric: str, value: float, unit: str, **rest: Any) -> Row:
    named = {name: rest.pop(name) for name in ("kind", "n", "lo", "hi") if name in rest}
    return Row(table=table, metric=metric, value=value, unit=unit, dims=rest, **named)


def _pool_memory() -> Iterator[Row]:
    for geometry, elements in GEOMETRIES.items():
        for tokens in (600, 1285, 2048, 5035):
            copy = 2.0 * elements * tokens
            for codec in ("full", "paper", "polykv", "int8"):
                pool, at = copy * BITS[codec] / 16, {"geometry": geometry, "context_tokens": tokens}
                for n in AGENTS:
                    numbers = {
                        "without_bytes": (n * copy, "B"), "shared_bytes": (copy, "B"), "pool_bytes": (pool, "B"),
                        "reduction_pct": (100 * (1 - pool / (n * copy)), "%"), "memory_ratio": (copy / pool, "x"),
                    }  # fmt: skip
                    for metric, (value, unit) in numbers.items():
                        yield _row("pool_memory", metric, value, unit, kind="computed", codec=codec,
                                   n_agents=n, dtype="bfloat16", **at)  # fmt: skip
                if geometry != "qwen2.5-7b":
                    yield _row("pool_memory", "pool_bytes", pool, "B", codec=codec, **at)
                    yield _row("pool_memory", "memory_ratio", copy / pool, "x", codec=codec, **at)


def _agents() -> Iterator[Row]:
    slope = {"shared-pool": 0.5, "expanded-batch": 9.0, "pooled-agent": 12.0, "no-document": 0.2}
    for n in AGENTS:
        at: dict[str, Any] = {"model": MODEL, "context_tokens": 2048, "n_agents": n}
        yield _row("agent_memory", "suffix_bytes_per_agent", 1.0e6, "B", **at)
        yield _row("agent_memory", "added_bytes_per_agent", 1.02e6, "B", **at)
        yield _row("agent_memory", "added_over_suffix", 1.02, "x", **at)
        for method, per_agent in slope.items():
            ms = 30 + per_agent * n
            yield _row(
                "decode_step",
                "ms_per_step",
                ms,
                "ms",
                n=20,
                lo=0.9 * ms,
                hi=1.2 * ms,
                method=method,
                **at,
            )
            if method != "no-document":
                yield _row(
                    "agent_memory",
                    "peak_bytes",
                    1e7 * (5 + per_agent * n),
                    "B",
                    method=method,
                    **at,
                )


def _opening() -> Iterator[Row]:
    at: dict[str, Any] = {"model": MODEL, "context_tokens": 2048}
    for checks, ms in (("none", 3.0), ("file", 6.0), ("file, model", 9.0)):
        yield _row(
            "opening", "open_ms", ms, "ms", n=5, lo=0.9 * ms, hi=1.2 * ms, checks=checks, **at
        )
    yield _row("opening", "private_bytes", 2.5e6, "B", n=4, **at)
    yield _row("opening", "document_bytes", 1.5e5, "B", n=4, **at)


def _perplexity() -> Iterator[Row]:
    for protocol, prefixes in (
        ("fixed-window", (600, 1285, 1851, 4096)),
        ("paper-70-30", (578, 1285, 1295)),
    ):
        for tokens in prefixes:
            for i, codec in enumerate(("full", "paper", "polykv", "int8")):
                delta, half = 0.4 * i * (i % 3 - 0.8) + 50 / tokens, 200 / tokens
                at: dict[str, Any] = {
                    "model": MODEL,
                    "protocol": protocol,
                    "prefix_tokens": tokens,
                    "codec": codec,
                    "n": 12,
                }
                yield _row("ppl", "ppl_full", 18.0, "ppl", **at)
                yield _row("ppl", "ppl_pool", 18.0 * (1 + delta / 100), "ppl", **at)
                yield _row(
                    "ppl", "ppl_delta_pct", delta, "%", lo=delta - half, hi=delta + half, **at
                )
                yield _row("ppl", "kl_nats", 0.002 * i, "nats", lo=0.0015 * i, hi=0.0025 * i, **at)
                yield _row("ppl", "top1_agreement", 1 - 0.01 * i, "share", **at)
    for codec, bits in BITS.items():
        kl = 0.3 * 2.0 ** (-bits)
        at = {"model": MODEL, "codec": codec}
        yield _row("kl_vs_bits", "bits_per_element", bits, "bits", **at)
        yield _row("kl_vs_bits", "kl_nats", kl, "nats", n=12, lo=0.8 * kl, hi=1.3 * kl, **at)
        yield _row("kl_vs_bits", "ppl_delta_pct", 100 * kl, "%", n=12, **at)
    for i in range(12):
        yield _row("documents", "ppl_delta_pct", 0.2 * i - 0.7, "%", codec="paper", document=f"article {i}",
                   protocol="paper-70-30", prefix_tokens=1285)  # fmt: skip


def _controls() -> Iterator[Row]:
    at: dict[str, Any] = {"model": MODEL, "n": 60}
    for tokens, names in ((420, ["paper"]), (1295, [*CONTROLS])):
        for name in names:
            delta = CONTROLS[name]
            own = at | {"control": name, "prefix_tokens": tokens}
            yield _row(
                "controls", "ppl_delta_pct", delta, "%", lo=delta - 0.2, hi=delta + 0.2, **own
            )
            for metric, value in (("negative_articles", 0.45), ("sign_test_p", 0.5),
                                  ("negative_runs", 0.48), ("seeds_alike", 0.3), ("kl_nats", 0.005),
                                  ("seeds_alike_by_chance", 0.0625), ("seed_sd_pct", 0.6),
                                  ("article_sd_pct", 0.9)):  # fmt: skip
                yield _row("controls", metric, value, "share", **own)
            yield _row("attention", "entropy", 2.8, "nats", lo=2.7, hi=2.9, **own)
            yield _row("distance", "ppl_delta_pct", delta, "%", distance="1 to 16", **own)


def _frontier() -> Iterator[Row]:
    codecs = {"paper": 5.6, "lean": 3.3, "affine3+tq3": 3.4, "by layer, 3 bits": 3.1}
    codecs |= {"by layer, 2.75 bits": 2.8, "shaped": 3.2, "tiered": 3.0}
    codecs["shaped4-3-eighth+tq4-2-eighth"] = 2.9
    for role in ("selection", "report"):
        for codec, bits in codecs.items():
            at: dict[str, Any] = {
                "model": MODEL,
                "prefix_tokens": 1851,
                "role": role,
                "codec": codec,
                "n": 16,
            }
            kl = 0.03 / bits
            yield _row("frontier", "bits_per_element", bits, "bits", lo=bits, hi=bits, **at)
            yield _row("frontier", "memory_ratio", 16 / bits, "x", **at)
            yield _row("frontier", "kl_nats", kl, "nats", lo=0.8 * kl, hi=1.2 * kl, **at)
            yield _row("frontier", "ppl_delta_pct", kl, "%", lo=-kl, hi=2 * kl, **at)
    for layer in range(2):
        yield _row("codec_plan", "bits", 3.25, "bits", codec="by layer, 3 bits", layer=layer,
                   side="keys", option="harmonic3", model=MODEL, prefix_tokens=1851)  # fmt: skip


def _fidelity() -> Iterator[Row]:
    level = {"pool": 0.97, "unrelated-document": 0.45, "no-document": 0.4}
    for n in AGENTS:
        for control, f1 in level.items():
            at: dict[str, Any] = {
                "n_agents": n,
                "codec": "polykv",
                "control": control,
                "model": MODEL,
            }
            scorer = {"encoder": "all-MiniLM-L6-v2", "layer": 6, "rescaled": False}
            low, high = f1 - 0.1 / n, min(1.0, f1 + 0.1 / n)
            yield _row("fidelity", "bertscore_f1", f1, "F1", n=n, lo=low, hi=high, **at, **scorer)
            yield _row(
                "fidelity",
                "token_overlap",
                f1 - 0.1,
                "share",
                n=n,
                lo=low - 0.1,
                hi=high - 0.1,
                **at,
            )


def _plans() -> Iterator[Row]:
    for keep in (0.25, 0.4):
        yield from _budget({"model": MODEL, "suite": "offline", "question": "hidden", "keep": keep})


def _budget(setting: dict[str, Any]) -> Iterator[Row]:
    kl = {
        ("H2O", "full"): 0.9,
        ("KeyDiff", "full"): 1.2,
        ("paper-b", "full"): 0.8,
        ("paper-b, ppl budgets", "full"): 0.4,
        ("gain-curve", "full"): 0.2,
        ("gain-curve-heads", "full"): 0.1,
        ("ours", "full"): 0.1,
        ("ours", "polykv"): 0.11,
    }
    roles = {"H2O": "best single", "KeyDiff": "single"}
    for (method, codec), value in kl.items():
        at = setting | {"method": method, "role": roles.get(method, "plan"), "codec": codec}
        for i, family in enumerate(("stated_fact", "continuation", "macro")):
            gap = 100 * (1 - value / 0.9) - 90 * i * (method == "paper-b")
            own: dict[str, Any] = at | {"family": family, "n": 12 if family == "macro" else 6}
            yield _row("recovery", "kl_nats", value, "nats", lo=0.8 * value, hi=1.3 * value, **own)
            yield _row("recovery", "gap_recovered_pct", gap, "%", lo=gap - 9, hi=gap + 4, **own)
            if codec == "full":
                yield _row("regret", "kl_over_nats", value - 0.9, "nats", against="best single",
                           method=method, family=family, lo=-0.9, hi=0.1, n=6, **setting)  # fmt: skip
        yield _row("quality_bytes", "kl_nats", value, "nats", **at)
        yield _row("quality_bytes", "pool_bytes", 1e6, "B", **at)
        yield _row("quality_bytes", "memory_ratio", 4.0 if codec == "full" else 10.0, "x", **at)
        if codec == "full":
            yield _row("choice", "kl_nats", value + 0.1, "nats", method=method, role="contender",
                       **setting)  # fmt: skip
        if method in ("paper-b", "gain-curve"):
            for layer in range(4):
                budget = 140 if method == "paper-b" else (40, 440, 40, 40)[layer]
                policy = ("H2O", "KeyDiff")[layer % 2]
                yield _row("plan", "budget", budget, "tokens", kind="computed", method=method,
                           layer=layer, policy=policy, context_tokens=560, **setting)  # fmt: skip
    for i, direction in enumerate(("forward", "inverse")):
        varied = setting | {"varied": "policies", "signal": "cosine", "direction": direction}
        yield _row("ablations", "kl_nats", 0.8 + i, "nats", n=12, lo=0.7 + i, hi=1.0 + i, **varied)
        yield _row("phases", "kl_nats", 0.3 + i, "nats", n=8, phase="decode", **varied)
        yield _row("signal_answers", "score", 0.3 - 0.1 * i, "share", n=12, **varied)


def _joint() -> Iterator[Row]:
    setting: dict[str, Any] = {"model": MODEL, "suite": "offline", "question": "hidden"}
    level = {
        "best single, full": 1.0,
        "gain-curve, shaped": 0.05,
        "joint": 0.02,
        "codec alone": 0.1,
    }
    for share in (0.25, 0.0625):
        at = setting | {"bytes_share": share}
        for method, kl in level.items():
            if method == "codec alone" and share < 0.1:
                continue  # no codec fits
            value = kl / share
            own = at | {"method": method, "codec": "full", "family": "macro", "n": 28}
            yield _row("joint", "kl_nats", value, "nats", lo=0.8 * value, hi=1.3 * value, **own)
            yield _row("joint", "gap_recovered_pct", 100 * (1 - kl), "%", **own)
            yield _row("joint", "pool_bytes", share * 1e7, "B", **own)
            if method != "joint":
                over = at | {"method": "joint", "against": method, "family": "macro", "n": 28}
                yield _row("joint_regret", "kl_over_nats", 0.02 - kl, "nats", **over)
        yield _row("joint_plan", "budget", 40, "tokens", kind="computed", layer=0, policy="H2O",
                   codec="lean", context_tokens=560, **at)  # fmt: skip
    for against in ("codec alone", "paper-b, ppl budgets", "best single, quantised",
                    "gain-curve, full", "gain-curve, shaped", "gain-curve, tiered"):  # fmt: skip
        yield _row("joint_wins", "points_won_pct", 100, "%", n=2, method="joint", against=against,
                   **setting)  # fmt: skip


def _throughput() -> Iterator[Row]:
    at = {"model": MODEL, "device": "cpu", "dtype": "bfloat16", "threads": 1}
    per_agent = {
        ("shared-pool", "full"): 0.5, ("shared-pool", "paper"): 0.4, ("shared-pool", "polykv"): 0.45,
        ("expanded-batch", "full"): 9.0, ("expanded-folded", "full"): 3.0, ("pooled-agent", "paper"): 12.0,
        ("no-document", None): 0.2,
    }  # fmt: skip
    for tokens in (512, 2048):
        for (method, codec), slope in per_agent.items():
            own: dict[str, Any] = at | {"context_tokens": tokens, "method": method, "codec": codec}
            for n in (1, 4, 15):
                ms = 30 + slope * n * tokens / 512
                spread = {"n": 7, "lo": 0.9 * ms, "hi": 1.2 * ms}
                yield _row("throughput", "step_ms", ms, "ms", n_agents=n, **spread, **own)
                yield _row("throughput", "tokens_per_s", 1000 * n / ms, "1/s", n_agents=n, **own)
                yield _row("throughput", "held_bytes", 1e6 * ms, "B", n_agents=n, **own)
            yield _row("scaling_in_agents", "ms_per_agent", slope, "ms", n=3, **own)
            if method == "shared-pool" and codec != "full":
                for metric in (
                    *("over_floor", "over_native_floor", "faster_than_expanded"),
                    *("faster_than_folded", "faster_than_native", "faster_than_pooled"),
                ):
                    yield _row("speedup", metric, 2.0, "x", n=7, n_agents=15, **own)
            if method != "no-document":
                yield _row("first_token", "ms", 50 + slope, "ms", n=3, **own)
                yield _row("first_token", "times_sooner", 20.0, "x", n=3, **own)
            if codec is not None:
                yield _row("checks", "kl_nats", 0.001, "nats", n=48, **own)
                yield _row("bandwidth", "gb_per_s", 9.0, "GB/s", geometry="llama-3-8b", **own)
            if method == "shared-pool":
                once = at | {"context_tokens": tokens, "method": "encode", "codec": codec}
                yield _row("encode", "over_prefill", 0.02, "x", n=3, **once)
        asked = at | {"context_tokens": tokens, "n_agents": 15, "peer": "other", "version": "1.0"}
        yield _row("peers", "tokens_per_s", 30.0, "1/s", n=3, method="expanded", **asked)
        for policy in ("plain", "SnapKV", "H2O"):
            once = at | {"context_tokens": tokens, "method": policy}
            yield _row("prefill", "over_prefill", 1.1, "x", n=3, **once)


@pytest.fixture(scope="session")
def synthetic() -> list[Record]:
    groups = {
        "memory_scaling": [*_pool_memory(), *_agents(), *_opening()],
        "ppl_inversion": list(_perplexity()),
        "agent_fidelity": list(_fidelity()),
        "plan_recovery": list(_plans()),
        "inversion_controls": list(_controls()),
        "throughput": list(_throughput()),
        "codec_frontier": list(_frontier()),
        "joint_plan": list(_joint()),
    }
    return [
        Record(
            experiment=name,
            key=f"{i:016x}",
            params={},
            status="ok",
            rows=rows,
            provenance={"profile": "synthetic", "cpu": "Some CPU"},
        )
        for i, (name, rows) in enumerate(groups.items())
    ]


@pytest.fixture
def synthetic_root(synthetic: list[Record], tmp_path: Path) -> Path:
    root = tmp_path / "results" / "synthetic"
    for record in synthetic:
        Store(write=root).put(record)
    return root


@pytest.fixture(scope="session")
def papers() -> Path:
    return Path(__file__).parents[2] / "data" / "papers"


TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Runs an experiment whose parts are kept, then again from its parts, which must be the same."""

    def outcome(run: Callable[..., Outcome], point: dict[str, Any]) -> Outcome:
        folder = tmp_path_factory.mktemp("parts") / "point" / "code"
        first, second = Parts(write=folder), Parts(write=folder)
        with keeping(first):
            computed = run(point, lambda text: None)
        with keeping(second):
            again = run(point, lambda text: None)
        assert not first.resumed, "no two parts of a point have one name"
        assert len(second.names) > 1
        assert set(second.resumed) == second.names
        assert (again.rows, again.samples) == (computed.rows, computed.samples)
        return computed

    return outcome


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """A small random Llama over bytes takes the place of every model; caches go elsewhere."""
    import torch  # here, since most tests of the study never need it
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from polykv_lib import hf

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8_192,
        initializer_range=0.4,  # large enough for the document to matter
    )
    model = hf.prepare(LlamaForCausalLM(config).eval())
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads only wait for each other at this size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "load_model", lambda name, **_: (model, tokenizer))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield model, tokenizer
    torch.set_num_threads(n_threads)
