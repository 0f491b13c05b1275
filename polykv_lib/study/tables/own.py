"""Our own measured and computed numbers as tables: settings down, metrics across."""

import pandas as pd

from polykv_lib.study.rows import pick
from polykv_lib.study.tables.own_plans import PLANS
from polykv_lib.study.tables.spec import Own

PEER = ("context_tokens", "n_agents", "peer", "version", "method")
MACHINE = ("model", "device", "dtype", "threads")
RUN = "key"  # of the record: times are compared within one run

OWN = {
    "pool_memory": Own(
        title="KV bytes by geometry, document length, agents and codec, computed from shapes",
        table="pool_memory",
        by=("geometry", "context_tokens", "n_agents", "codec"),
        metrics=("without_bytes", "shared_bytes", "pool_bytes", "reduction_pct", "memory_ratio"),
        kind="computed",
    ),
    "pool_memory_measured": Own(
        title="Pools really built from tensors of these shapes, counted byte by byte",
        table="pool_memory",
        by=("geometry", "context_tokens", "codec"),
        metrics=("pool_bytes", "memory_ratio"),
    ),
    "agent_memory": Own(
        title="What one more agent costs, and the peak while N agents decode",
        table="agent_memory",
        by=("model", "method", "context_tokens", "n_agents"),
        metrics=(
            *("suffix_bytes_per_agent", "added_bytes_per_agent", "added_over_suffix"),
            "peak_bytes",
        ),
    ),
    "decode_step": Own(
        title="Time of one decoding step for all agents, methods interleaved in one run",
        table="decode_step",
        by=("model", "context_tokens", "n_agents", "method"),
        metrics=("ms_per_step",),
    ),
    "opening": Own(
        title="Opening a saved pool, by what is checked, and what a process that shares it adds",
        table="opening",
        by=("model", "dtype", "codec", "context_tokens", "checks"),
        metrics=("open_ms", "private_bytes", "document_bytes"),
    ),
    "throughput": Own(
        title="Decode steps of N agents: all methods interleaved in one run, answers checked first",
        table="throughput",
        by=(*MACHINE, "context_tokens", "n_agents", "method", "codec", RUN),
        metrics=(
            *("tokens_per_s", "step_ms", "step_min_ms", "held_bytes", "peak_bytes"),
            *("step_bytes", "scratch_bytes"),
        ),
    ),
    "speedup": Own(
        title="A pool's step beside the other methods', round by round",
        table="speedup",
        by=(*MACHINE, "context_tokens", "n_agents", "codec", RUN),
        metrics=(
            *("over_floor", "over_native_floor", "faster_than_expanded", "faster_than_folded"),
            *("faster_than_native", "faster_than_pooled"),
        ),
    ),
    "scaling_in_agents": Own(
        title="What one more agent adds: least squares over the numbers of agents",
        table="scaling_in_agents",
        by=(*MACHINE, "context_tokens", "method", "codec", RUN),
        metrics=("ms_per_agent", "bytes_per_agent"),
    ),
    "prefill": Own(
        title="Reading the document, with and without eviction",
        table="prefill",
        by=(*MACHINE, "context_tokens", "method", RUN),
        metrics=("ms", "over_prefill"),
    ),
    "encode": Own(
        title="Encoding the document's cache, beside its plain prefill",
        table="encode",
        by=(*MACHINE, "context_tokens", "codec", RUN),
        metrics=("ms", "over_prefill"),
    ),
    "first_token": Own(
        title="First token of a new agent, and how much sooner than by reading all again",
        table="first_token",
        by=(*MACHINE, "context_tokens", "method", "codec", RUN),
        metrics=("ms", "times_sooner"),
    ),
    "checks": Own(
        title="Answers of every timed method beside those of a plain cache",
        table="checks",
        by=(*MACHINE, "context_tokens", "method", "codec"),
        metrics=("tokens_equal", "kl_nats", "kl_full_nats"),
    ),
    "peers": Own(
        title="Other packages under one protocol, each in its own environment, in turns",
        table="peers",
        by=("model", "dtype", "threads", *PEER),
        metrics=(
            *("tokens_equal", "tokens_per_s", "read_ms", "first_ms", "answers_ms"),
            "held_bytes",
        ),
    ),
    "bandwidth": Own(
        title="Attention of one step on random keys and values, beside the device's copying",
        table="bandwidth",
        by=(*MACHINE, "geometry", "context_tokens", "n_agents", "method", "codec", RUN),
        metrics=("step_ms", "read_bytes", "gb_per_s", "share_of_copy", "relative_error"),
    ),
    "ppl": Own(
        title="Perplexity and agreement with the full cache (paired over documents)",
        table="ppl",
        by=("model", "protocol", "text", "prefix_tokens", "codec"),
        metrics=(
            *("ppl_full", "ppl_pool", "ppl_delta_pct", "nll_delta_nats", "kl_nats"),
            *("top1_agreement", "ppl_no_document"),
        ),
    ),
    "kl_vs_bits": Own(
        title="KL divergence from the full cache against stored bits",
        table="kl_vs_bits",
        by=("model", "codec"),
        metrics=("bits_per_element", "kl_nats", "ppl_delta_pct"),
    ),
    "controls": Own(
        title="What changes perplexity: the published codec taken apart (paired over articles)",
        table="controls",
        by=("model", "prefix_tokens", "control"),
        metrics=(
            *("ppl_delta_pct", "kl_nats", "negative_articles", "sign_test_p", "negative_runs"),
            *("seeds_alike", "seed_sd_pct", "article_sd_pct"),
        ),
    ),
    "distance": Own(
        title="Perplexity change by how many tokens after the document a token stands",
        table="distance",
        by=("model", "prefix_tokens", "control", "distance"),
        metrics=("ppl_delta_pct",),
    ),
    "attention": Own(
        title="Attention of the scored tokens: entropy and mass, and their change",
        table="attention",
        by=("model", "prefix_tokens", "control"),
        metrics=(
            *("entropy", "entropy_change", "sink_mass", "sink_mass_change"),
            *("document_mass", "document_mass_change"),
        ),
    ),
    "frontier": Own(
        title="The codec frontier: chosen on one half of the articles, reported on the other",
        table="frontier",
        by=("model", "prefix_tokens", "role", "codec"),
        metrics=("bits_per_element", "memory_ratio", "kl_nats", "ppl_delta_pct"),
    ),
    "codec_plan": Own(
        title="Codecs of each layer under one total of bytes, and the bits that they take",
        table="codec_plan",
        by=("model", "prefix_tokens", "codec", "layer", "side", "option"),
        metrics=("bits",),
    ),
    "fidelity": Own(
        title="Agents' answers against the full cache's answers, with controls",
        table="fidelity",
        by=(
            *("model", "context_tokens", "n_agents", "codec", "control"),
            *("encoder", "layer", "rescaled"),
        ),
        metrics=("bertscore_f1", "token_overlap", "exact_match", "nll_delta_nats", "n_empty"),
    ),
    **PLANS,
}


def own_table(numbers: pd.DataFrame, own: Own) -> pd.DataFrame:
    """The numbers of one table; a metric is followed by its `lo` and `hi` where it has them."""
    chosen = pick(numbers, table=own.table, kind=own.kind)
    by = [column for column in ("profile", *own.by) if chosen[column].notna().any()]
    lines = [
        {**dict(zip(by, setting, strict=True)), **_cells(group, own.metrics)}
        for setting, group in (chosen.groupby(by, dropna=False) if by else ())
    ]
    return pd.DataFrame(lines)


def _cells(group: pd.DataFrame, metrics: tuple[str, ...]) -> dict[str, float]:
    cells = {"n": float("nan")}  # of the first metric that says over what its interval is
    for metric in metrics:
        found = pick(group, metric=metric)
        if len(found):
            value, n, low, high = found.iloc[-1][["value", "n", "lo", "hi"]]
            cells[metric] = value
            cells["n"] = n if pd.isna(cells["n"]) else cells["n"]
            if not pd.isna(low):
                cells |= {f"{metric} lo": low, f"{metric} hi": high}
    if _counts_an_unread_pool(group):
        cells.pop("peak_bytes", None)
    return cells


def _counts_an_unread_pool(group: pd.DataFrame) -> bool:
    """Whether a method without a document has a peak, but not what its step takes.

    Records without `step_bytes` add a pool to the peak of every method that has no dense copies.
    """
    reads_none = group["method"].astype(str).str.startswith("no-document").all()
    return bool(reads_none) and "step_bytes" not in set(group["metric"])
