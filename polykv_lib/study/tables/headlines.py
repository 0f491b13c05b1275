"""The few numbers a reader looks for first, each with the command that measures it."""

import pandas as pd

from polykv_lib.study.render import number
from polykv_lib.study.rows import DIMS, on_device, pick
from polykv_lib.study.tables.headlines_plans import PLAN_HEADLINES
from polykv_lib.study.tables.spec import Headline

COLUMNS = ("what", "setting", "ours", "95 % interval", "n", "paper", "command")
SIZES = {"prefix_tokens": "tokens in the pool", "context_tokens": "tokens", "n_agents": "agents"}
CODECS = {"paper": "paper A's codec", "polykv": "the polykv codec"}
INVERSION = {
    "paper-plain": "paper A's codec without signs, as published",
    "v-gaussian": "Gaussian noise on values, matched energy",
    "v-shrunk": "values shrunk, no noise",
    "temperature-1.05": "attention at temperature 1.05",
}
FRONTIER = {
    "paper": "paper A's codec",
    "tiered": "the tiered codec",
    "shaped4-3-eighth+tq4-2-eighth": "the slim codec",
    "by layer, 2.75 bits": "codecs by layer",
}
SPEEDUPS = {
    "over_floor": "step of a pool / step without a document, paper A's codec",
    "faster_than_folded": "the step, times faster than a copy an agent, heads folded",
    "faster_than_native": "the same, that cache read by this kernel too",
    "faster_than_expanded": "the same, times faster than an ordinary batch",
    "faster_than_pooled": "the same, times faster than paper A's way, agent by agent",
}
CONTROLS = {
    "pool": "answers from the pool",
    "unrelated-document": "control: an unrelated document",
    "no-document": "control: no document",
}

HEADLINES = (
    *(
        Headline(
            what=f"one bf16 copy / pool, {name}, head_dim 128",
            table="pool_memory",
            metric="memory_ratio",
            where={"kind": "measured", "geometry": "llama-3-8b", "codec": codec},
            paper="2.91, norms not counted" if codec == "paper" else "",
        )
        for codec, name in CODECS.items()
    ),
    *(
        Headline(
            what=f"{label}, {name}",
            table="ppl",
            metric=metric,
            where={"protocol": "fixed-window", "codec": codec},
        )
        for codec, name in CODECS.items()
        for metric, label in (
            ("ppl_delta_pct", "perplexity change, %"),
            ("kl_nats", "KL from the full cache, nats"),
        )
    ),
    Headline(
        what="perplexity change, %, paper A's codec, mean over signs",
        table="controls",
        metric="ppl_delta_pct",
        where={"control": "paper"},
        paper="-0.26 on one text",
    ),
    *(
        Headline(
            what=f"perplexity change, %, {name}",
            table="controls",
            metric="ppl_delta_pct",
            where={"control": control},
        )
        for control, name in INVERSION.items()
    ),
    *(
        Headline(
            what=f"{label}, {name}, articles not chosen on",
            table="frontier",
            metric=metric,
            where={"role": "report", "codec": codec},
        )
        for codec, name in FRONTIER.items()
        for metric, label in (
            ("memory_ratio", "one bf16 copy / pool"),
            ("kl_nats", "KL from the full cache, nats"),
        )
    ),
    *(
        Headline(
            what=label, table="speedup", metric=metric, where={"codec": "paper", "n_agents": 15}
        )
        for metric, label in SPEEDUPS.items()
    ),
    Headline(
        what="encoding / prefill, paper A's codec",
        table="encode",
        metric="over_prefill",
        where={"codec": "paper", "method": "encode"},
    ),
    Headline(
        what="first token sooner than by reading again, times, paper A's codec",
        table="first_token",
        metric="times_sooner",
        where={"codec": "paper", "method": "shared-pool"},
    ),
    *(
        Headline(
            what=f"prefill with {policy} / plain prefill",
            table="prefill",
            metric="over_prefill",
            where={"method": policy},
        )
        for policy in ("SnapKV", "H2O")
    ),
    *(
        Headline(
            what=f"BERTScore F1 against the full cache's answers, {name}",
            table="fidelity",
            metric="bertscore_f1",
            where={"control": control},
        )
        for control, name in CONTROLS.items()
    ),
    *PLAN_HEADLINES,
)


def headlines(numbers: pd.DataFrame) -> pd.DataFrame:
    """The headline numbers that are stored, as text, ready to print.

    Args:
        numbers: what `rows.tidy` returned.
    """
    lines = [line for headline in HEADLINES for line in _lines(headline, numbers)]
    return pd.DataFrame(lines, columns=pd.Index(COLUMNS))


def _lines(headline: Headline, numbers: pd.DataFrame) -> list[dict[str, str]]:
    rows = pick(numbers, table=headline.table, metric=headline.metric, **headline.where)
    for size in SIZES:
        if rows[size].notna().any():
            rows = rows[rows[size] == rows[size].max()]
    most = rows.sort_values("n", kind="stable").drop_duplicates(list(DIMS), keep="last")
    rows = rows[rows.index.isin(most.index)]
    return [_line(headline, row) for _, row in rows.iterrows()]


def _line(headline: Headline, row: pd.Series) -> dict[str, str]:
    sizes = [
        f"{number(row[size])} {unit}" for size, unit in SIZES.items() if not pd.isna(row[size])
    ]
    named = [str(row[name]) for name in ("model", "codec", "encoder") if not pd.isna(row[name])]
    if not pd.isna(row["suite"]):
        sizes.append(f"{row['suite']} suite, question {row['question']}")
    if not pd.isna(row["keep"]):
        sizes.append(f"{row['keep']:.0%} of the tokens kept")
    if not pd.isna(row["bytes_share"]):
        sizes.append(f"1/{1 / row['bytes_share']:.0f} of one bf16 copy")
    if not pd.isna(row["threads"]):
        sizes += [str(row["dtype"]), on_device(row)]
    return {
        "what": headline.what,
        "setting": ", ".join([*named, *sizes]),
        "ours": number(row["value"]),
        "95 % interval": ""
        if pd.isna(row["lo"])
        else f"{number(row['lo'])} to {number(row['hi'])}",
        "n": number(row["n"]),
        "paper": headline.paper,
        "command": f"`polykv run --profile {row['profile']} --only {row['experiment']}`",
    }
