"""The answer to "does compression regularise?", by a rule that was fixed before the results.

Decided at the length where the controls were run, on the published codec: the mean change of NLL
over articles, its 95 % interval, and the sign test over articles.

    compression costs         the whole interval lies above zero
    compression regularises   it lies below zero, and most articles fall, sign test p < 0.05
    the sign is noise         anything else
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from polykv_lib.study.render import number
from polykv_lib.study.rows import pick

PAPER = "paper"
P_VALUE = 0.05
POWER_80 = (1.96 + 0.84) / (2 * 1.96)  # of an interval's width: what is seen 4 times of 5
SETTING = ("profile", "model")


def decision(numbers: pd.DataFrame) -> pd.DataFrame:
    """Each statistic with its interval and what symmetric noise gives; the answer comes last."""
    controls = pick(numbers, table="controls", kind="measured")
    return pd.DataFrame(
        {"profile": profile, "model": model} | line
        for (profile, model), group in controls.groupby(list(SETTING))
        for line in _lines(group)
    )


def answer(numbers: pd.DataFrame) -> str:
    """The answer in one paragraph, by the rule.

    Args:
        numbers: what `rows.tidy` returned; the controls of one profile and model.
    """
    controls = pick(numbers, table="controls")
    at = _at(controls)
    delta, falls, p = at["ppl_delta_pct"], at["negative_articles"], at["sign_test_p"]["value"]
    ruled = verdict(delta["lo"], delta["hi"], falls["value"], p)
    moved = [
        f"{line['statistic']} ({number(line['value'])} %)"
        for line in _controls(controls)
        if line["lo"] > 0 or line["hi"] < 0
    ]
    return (
        f"By the rule, {ruled}. At {number(at['tokens'])} tokens the published codec changes "
        f"perplexity by {number(delta['value'])} % (95 % interval {number(delta['lo'])} to "
        f"{number(delta['hi'])}, {number(delta['n'])} articles); a change of "
        f"{number(_visible(delta))} % would be seen four times of five. Perplexity falls in "
        f"{100 * falls['value']:.0f} % of the articles (symmetric noise: 50 %, p = {number(p)}). "
        f"{_seeds(at)}Controls whose interval excludes zero: {', '.join(moved) or 'none'}."
    )


def verdict(lo: float, hi: float, share_negative: float, p: float) -> str:
    """What the rule says of an interval of the change and of a sign test."""
    if lo > 0:
        return "compression costs"
    if hi < 0 and share_negative > 0.5 and p < P_VALUE:
        return "compression regularises"
    return "the sign is noise"


def _lines(controls: pd.DataFrame) -> Iterator[dict[str, Any]]:
    at = _at(controls)
    delta = at["ppl_delta_pct"]
    for _, row in pick(controls, control=PAPER, metric="ppl_delta_pct").iterrows():
        name = f"perplexity change, %, paper's codec, {number(row['prefix_tokens'])} tokens"
        yield _line(name, row, noise="0")
    yield _line("share of articles whose perplexity falls", at["negative_articles"], noise="0.5")
    yield _line("p of that share, sign test", at["sign_test_p"])
    yield _line("share of runs (passage and seed) that fall", at["negative_runs"], noise="0.5")
    if "seeds_alike" in at:
        yield _line(
            "share of passages in which all seeds have one sign",
            at["seeds_alike"],
            noise=number(at["seeds_alike_by_chance"]["value"]),
        )
        yield _line("spread over seeds, sd, %", at["seed_sd_pct"])
    yield _line("spread over articles, sd, %", at["article_sd_pct"])
    yield {
        "statistic": "change seen with a power of 80 %, %",
        "value": _visible(delta),
        "n": delta["n"],
    }
    for line in _controls(controls):
        yield line | {"statistic": f"perplexity change, %, {line['statistic']}"}
    says = verdict(
        delta["lo"], delta["hi"], at["negative_articles"]["value"], at["sign_test_p"]["value"]
    )
    yield {"statistic": f"answer: {says}", "value": delta["value"], "n": delta["n"]}


def _controls(controls: pd.DataFrame) -> list[dict[str, Any]]:
    changes = pick(controls, metric="ppl_delta_pct", prefix_tokens=_at(controls)["tokens"])
    return [
        _line(str(row["control"]), row, noise="0")
        for _, row in changes[changes["control"] != PAPER].iterrows()
    ]


def _line(statistic: str, row: pd.Series, noise: str = "") -> dict[str, Any]:
    return {
        "statistic": statistic,
        "value": row["value"],
        "value lo": row["lo"],
        "value hi": row["hi"],
        "lo": row["lo"],
        "hi": row["hi"],
        "n": row["n"],
        "symmetric noise": noise,
    }


def _at(controls: pd.DataFrame) -> dict[str, Any]:
    """The published codec's numbers by metric, at the length where most controls were run."""
    tokens = controls.groupby("prefix_tokens")["control"].nunique().idxmax()
    own = pick(controls, control=PAPER, prefix_tokens=tokens)
    return {"tokens": tokens} | {row["metric"]: row for _, row in own.iterrows()}


def _visible(delta: pd.Series) -> float:
    return float((delta["hi"] - delta["lo"]) * POWER_80)


def _seeds(at: dict[str, Any]) -> str:
    if "seeds_alike" not in at:
        return ""
    return (
        f"Other signs of the rotation move a passage by {number(at['seed_sd_pct']['value'])} % "
        f"(sd); all seeds agree on the sign in {100 * at['seeds_alike']['value']:.0f} % of the "
        f"passages (by chance: {100 * at['seeds_alike_by_chance']['value']:.0f} %). "
    )
