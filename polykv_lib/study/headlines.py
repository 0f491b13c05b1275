"""The few numbers a reader looks for first, each with the command that measures it."""

import pandas as pd

from polykv_lib.study.headline import Headline
from polykv_lib.study.headlines_plans import PLAN_HEADLINES
from polykv_lib.study.render import number
from polykv_lib.study.rows import DIMS, on_device, pick

COLUMNS = ("what", "setting", "ours", "95 % interval", "n", "paper", "command")
SIZES = {"prefix_tokens": "tokens in the pool", "context_tokens": "tokens", "n_agents": "agents"}
CODECS = {"paper": "the paper's codec", "polykv": "the polykv codec"}
INVERSION = {
    "v-gaussian": "Gaussian noise on values, matched energy",
    "v-shrunk": "values shrunk, no noise",
    "temperature-1.05": "attention at temperature 1.05",
}
FRONTIER = {
    "paper": "the paper's codec",
    "lean": "the lean codec",
    "by layer, 3.4 bits": "codecs by layer",
}
METHODS = {
    "shared-pool": "one shared pool",
    "expanded-batch": "an ordinary cache, one copy an agent",
    "pooled-agent": "the paper's way, one decompressed cache an agent",
}
SPEEDUPS = {
    "over_floor": "step / step without document",
    "faster_than_expanded": "step, times faster than an ordinary cache, one copy an agent",
    "faster_than_folded": "the same, its heads folded",
    "faster_than_pooled": "step, times faster than the paper's way",
}
CONTROLS = {
    "pool": "answers from the pool",
    "unrelated-document": "control: an unrelated document",
    "no-document": "control: no document",
}

HEADLINES = (
    *(
        Headline(
            what=f"one bf16 copy / pool, {name}, head_dim {head_dim}",
            table="pool_memory",
            metric="memory_ratio",
            where={"kind": "measured", "geometry": geometry, "codec": codec},
            paper="2.91, norms not counted" if codec == "paper" else "",
        )
        for codec, name in CODECS.items()
        for geometry, head_dim in (("smollm2-135m", 64), ("llama-3-8b", 128))
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
        what="perplexity change, %, the paper's codec, mean over signs",
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
    Headline(
        what="bytes an added agent takes / bytes of its own suffix",
        table="agent_memory",
        metric="added_over_suffix",
    ),
    *(
        Headline(
            what=f"decoding step, ms, {name}",
            table="decode_step",
            metric="ms_per_step",
            where={"method": method},
        )
        for method, name in METHODS.items()
    ),
    *(
        Headline(what=f"{label}, {name}", table="speedup", metric=metric, where={"codec": codec})
        for codec, name in CODECS.items()
        for metric, label in SPEEDUPS.items()
    ),
    *(
        Headline(
            what=f"{label}, {name}",
            table=table,
            metric=metric,
            where={"codec": codec, "method": method},
        )
        for codec, name in CODECS.items()
        for table, method, metric, label in (
            ("encode", "encode", "over_prefill", "encoding / prefill"),
            (
                "first_token",
                "shared-pool",
                "times_sooner",
                "first token sooner than by reading again",
            ),
        )
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
