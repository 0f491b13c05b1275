"""The headline numbers of eviction plans and of joint plans."""

from polykv_lib.study.tables.spec import Headline

PLANS = {
    "paper-b": "cosine routing, equal budgets",
    "paper-b, ppl budgets": "cosine routing, budgets by perplexity",
    "ours": "our plan",
}
KEPT = 0.25
HIDDEN: dict[str, str | float] = {"question": "hidden"}
BYTES = 1 / 16  # of one bf16 copy
AT_EQUAL_BYTES = {
    "codec alone": "codecs without eviction",
    "paper-b, ppl budgets": "cosine routing in bf16, budgets by perplexity",
    "gain-curve, shaped": "our plan with every layer in the shaped codec",
}

PLAN_HEADLINES = (
    *(
        Headline(
            what=f"share of the best single policy's KL removed, %, {name}",
            table="recovery",
            metric="gap_recovered_pct",
            where=HIDDEN | {"method": method, "family": "macro", "codec": "full", "keep": KEPT},
        )
        for method, name in PLANS.items()
    ),
    Headline(
        what="the same, our plan, kept tokens in the polykv codec",
        table="recovery",
        metric="gap_recovered_pct",
        where=HIDDEN | {"method": "ours", "family": "macro", "codec": "polykv", "keep": KEPT},
    ),
    Headline(
        what="one bf16 copy / that pool",
        table="quality_bytes",
        metric="memory_ratio",
        where=HIDDEN | {"method": "ours", "codec": "polykv", "keep": KEPT},
    ),
    Headline(
        what="share of the best single policy's KL removed, %, joint plan",
        table="joint",
        metric="gap_recovered_pct",
        where={"method": "joint", "family": "macro", "bytes_share": BYTES},
    ),
    *(
        Headline(
            what=f"byte budgets at which the joint plan beats {name}, %",
            table="joint_wins",
            metric="points_won_pct",
            where={"against": method},
        )
        for method, name in AT_EQUAL_BYTES.items()
    ),
)
