"""The headline numbers of eviction plans and of joint plans."""

from polykv_lib.study.headline import Headline

PLANS = {
    "paper-b": "cosine routing, equal budgets",
    "paper-b, ppl budgets": "cosine routing, budgets by perplexity",
    "ours": "our plan",
}
KEPT = (0.25, 0.4)
BYTES = 1 / 16  # of one bf16 copy
AT_EQUAL_BYTES = {
    "codec alone": "codecs without eviction",
    "paper-b, ppl budgets": "cosine routing in bf16",
    "best single, quantised": "the best single policy, quantised",
    "gain-curve, full": "our plan in bf16",
    "gain-curve, tiered": "our plan in the tiered codec",
}

PLAN_HEADLINES = (
    *(
        Headline(
            what=f"KL to the best single policy won back at {keep:.0%}, %, {name}",
            table="recovery",
            metric="gap_recovered_pct",
            where={"method": method, "family": "macro", "codec": "full", "keep": keep},
        )
        for keep in KEPT
        for method, name in PLANS.items()
    ),
    Headline(
        what="the same, our plan, kept tokens quantised",
        table="recovery",
        metric="gap_recovered_pct",
        where={"method": "ours", "family": "macro", "codec": "polykv", "keep": KEPT[0]},
    ),
    Headline(
        what="KL of our plan minus the best single policy's, nats, where text goes on",
        table="regret",
        metric="kl_over_nats",
        where={
            "method": "ours",
            "against": "best single",
            "family": "continuation",
            "keep": KEPT[0],
        },
    ),
    Headline(
        what="one bf16 copy / evicted and quantised pool",
        table="quality_bytes",
        metric="memory_ratio",
        where={"method": "ours", "codec": "polykv", "keep": KEPT[0]},
    ),
    Headline(
        what="KL to the best single policy in bf16 won back by the joint plan, %",
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
