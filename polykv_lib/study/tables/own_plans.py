"""Tables of the eviction plans and of the joint plans."""

from polykv_lib.study.tables.spec import Own

PLANS = {
    "recovery": Own(
        title="Answers from evicted caches, at equal numbers of kept tokens (paired over items)",
        table="recovery",
        by=("model", "suite", "question", "keep", "family", "role", "method", "codec"),
        metrics=("kl_nats", "gap_recovered_pct", "nll_delta_nats", "exact", "score"),
    ),
    "regret": Own(
        title="KL of a plan minus KL of what it is measured against: below 0 is better (paired)",
        table="regret",
        by=("model", "suite", "question", "keep", "method", "against", "family"),
        metrics=("kl_over_nats",),
    ),
    "choice": Own(
        title="What chose our plan: KL on calibration items that the plans were not made from",
        table="choice",
        by=("model", "suite", "question", "keep", "role", "method"),
        metrics=("kl_nats",),
    ),
    "quality_bytes": Own(
        title="Quality against bytes: evicted, quantised, shared (mean over families)",
        table="quality_bytes",
        by=("model", "suite", "question", "keep", "role", "method", "codec"),
        metrics=("kl_nats", "nll_delta_nats", "pool_bytes", "memory_ratio"),
    ),
    "plan": Own(
        title="Plans: each layer's policy, and its tokens a head",
        table="plan",
        by=(
            *("model", "suite", "question", "keep", "context_tokens"),
            *("method", "layer", "policy"),
        ),
        metrics=("budget",),
        kind="computed",
    ),
    "joint": Own(
        title="Either paper's way, and one plan for both, at equal bytes (paired over items)",
        table="joint",
        by=("model", "suite", "question", "bytes_share", "family", "method", "codec"),
        metrics=("kl_nats", "gap_recovered_pct", "nll_delta_nats", "pool_bytes", "memory_ratio"),
    ),
    "joint_regret": Own(
        title="KL of the joint plan minus another method's at equal bytes: below 0 is better",
        table="joint_regret",
        by=("model", "suite", "question", "bytes_share", "against", "family"),
        metrics=("kl_over_nats",),
    ),
    "joint_wins": Own(
        title="Byte budgets at which the joint plan's KL is lower, its whole interval below 0",
        table="joint_wins",
        by=("model", "suite", "question", "against"),
        metrics=("points_won_pct",),
    ),
    "joint_plan": Own(
        title="Joint plans: each layer's policy, codec, and mean tokens a head",
        table="joint_plan",
        by=(
            *("model", "suite", "question", "bytes_share", "context_tokens"),
            *("layer", "policy", "codec"),
        ),
        metrics=("budget",),
        kind="computed",
    ),
    "ablations": Own(
        title="What makes a plan good: KL beside the best single policy's (mean over families)",
        table="ablations",
        by=("model", "suite", "question", "keep", "varied", "signal", "direction"),
        metrics=(
            *("kl_nats", "kl_over_single_nats", "gap_recovered_pct", "nll_delta_nats", "exact"),
            "rank_among_shuffles",
        ),
    ),
    "signal_answers": Own(
        title="Free answers under the plans of one signal at prefill (mean over tasks)",
        table="signal_answers",
        by=("model", "suite", "question", "keep", "varied", "signal", "direction"),
        metrics=("score",),
    ),
    "phases": Own(
        title="Policies by phase: KL beside the best single policy's in the same phase",
        table="phases",
        by=("model", "suite", "question", "keep", "phase", "varied", "signal", "direction"),
        metrics=("kl_nats", "kl_over_single_nats", "gap_recovered_pct", "nll_delta_nats", "exact"),
    ),
}
