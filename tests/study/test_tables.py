"""Published numbers, their arithmetic, and ours beside them."""

import csv
import re
import sys
from pathlib import Path
from subprocess import run

import pandas as pd
import pytest

from polykv_lib import presets
from polykv_lib.study import tables
from polykv_lib.study.published import SHAPES, cached_tokens, published_rows, scored_tokens
from polykv_lib.study.published.arithmetic import arithmetic_findings
from polykv_lib.study.record import Record, Row
from polykv_lib.study.render import latex, markdown, number
from polykv_lib.study.rows import family, tidy
from polykv_lib.study.tables.comparison import paper_vs_ours, same_protocol
from polykv_lib.study.tables.headlines import HEADLINES, headlines

NAMES = {"source", "table", "model", "text", "method", "benchmark", "decision", "signal", "phase",
         "best_baseline_name", "label_tokens", "cached_tokens_derived", "dtype_derived", "n_agents",
         "avg_budget", "budget", "kv_bits"}  # fmt: skip


def record(*rows: Row, profile: str = "synthetic") -> Record:
    return Record(experiment="made_up", key="0" * 16, params={}, status="ok", rows=list(rows),
                  provenance={"profile": profile})  # fmt: skip


def ppl_row(model: str, value: float, lo: float, hi: float, **dims: object) -> Row:
    at = {"protocol": "paper-70-30", "prefix_tokens": 1285, "codec": "paper", "model": model} | dims
    return Row(
        table="ppl", metric="ppl_delta_pct", value=value, unit="%", n=9, lo=lo, hi=hi, dims=at
    )


def test_every_published_number_has_a_line(papers: Path) -> None:
    printed = []
    for file in sorted(papers.glob("*.csv")):
        for line in csv.DictReader(file.read_text().splitlines()):
            cells = [text for name, text in line.items() if name not in NAMES and text]
            printed += [float(part) for text in cells for part in text.split(";")]
    assert sorted(printed) == sorted(row.value for row in published_rows(papers))
    assert len(paper_vs_ours([], papers)) == len(printed) == 243


def test_shapes_are_the_presets() -> None:
    for model, shape in SHAPES.items():
        assert presets.geometry(family(model)).elements_per_token == shape.elements_per_token


def test_cached_tokens_are_those_of_the_published_code(papers: Path) -> None:
    lines = pd.read_csv(papers / "pool_memory.csv")
    assert [cached_tokens(n) for n in lines["label_tokens"]] == list(lines["cached_tokens_derived"])
    assert (cached_tokens(600), scored_tokens(600), scored_tokens(7194)) == (578, 247, 2158)


@pytest.mark.parametrize(
    ("topic", "quantity", "value"),
    [
        ("'without' column, label 7,194, 15 agents", "15 private copies of 5,035 tokens in float32", 19.798),
        ("'without' column, label 7,194, 15 agents", "15 private copies of 5,035 tokens in bfloat16", 9.899),
        ("pool of 5,035 tokens", "packed, fp16 norms", 0.2294),
        ("pool of 5,035 tokens", "as the published code allocates: a byte a value code, fp32 norms", 0.3351),
        ("memory while decoding", "15 agents alive, each holding its decompressed bfloat16 cache", 9.899),
        ("BERTScore F1 after baseline rescaling", "15 agents, label 7,194", 0.573),
        ("reduction, label 7,194, 15 agents", "of which compression adds", 4.375),
    ],
)  # fmt: skip
def test_arithmetic_says_what_a_number_counts(
    papers: Path, topic: str, quantity: str, value: float
) -> None:
    found = arithmetic_findings(papers).query("topic == @topic and quantity == @quantity")
    assert found["value"].item() == pytest.approx(value, abs=6e-4)


def test_arithmetic_reproduces_each_printed_gigabyte_as_float32(papers: Path) -> None:
    found = arithmetic_findings(papers)
    printed = found[found["printed"].notna()]
    in_bf16 = printed["quantity"].str.endswith("bfloat16")
    assert (printed[~in_bf16]["agrees"] == "yes").all()
    assert (printed[in_bf16]["agrees"] == "no").all()
    assert len(printed) == 23


def test_inversion_is_less_than_one_standard_error(papers: Path) -> None:
    found = arithmetic_findings(papers)
    errors = found[found["topic"].str.contains("ARPANET") & (found["unit"] == "SE")]["value"]
    assert errors.round(2).tolist() == [0.69, 0.31]


def test_memory_rows_compute_and_measure_but_never_copy(
    papers: Path, synthetic: list[Record]
) -> None:
    without = paper_vs_ours([], papers).set_index(["row", "metric"])
    line = without.loc[("7,194 tokens, 15 agents", "without_gb")]
    assert (line["status"], line["kind"]) == ("differs", "computed")
    assert line["ours"] == pytest.approx(line["paper"] / 2, rel=1e-4)
    assert "float32 bytes (19.798 GB)" in line["why"]
    assert (without.loc[("7,194 tokens, 15 agents", "reduction_pct")]["status"]) == "reproduced"

    built = paper_vs_ours(synthetic, papers).set_index(["row", "metric"])
    line = built.loc[("7,194 tokens, 15 agents", "with_gb")]
    assert line["kind"] == "measured"
    assert line["ours"] == pytest.approx(5035 * 65_536 * 5.6 / 8 / 1e9)


def test_what_was_not_run_says_so_and_has_no_number(papers: Path, synthetic: list[Record]) -> None:
    compared = paper_vs_ours(synthetic, papers)
    missing = compared[compared["status"] == "not run here"]
    assert len(missing) == 243 - 15
    assert missing["ours"].isna().all()
    assert missing["why"].str.len().gt(10).all()
    eviction = missing[missing["paper table"].str.startswith("2606.15157v1, Table 1")]
    assert set(eviction["why"]) == {
        "the lowest of five plans that are not named has no parameters",
        *(
            f"{model} on {suite} is a point of the grid t4-8b, for two T4s"
            for model in ("LLaMA-3.1-8B", "Qwen3-8B")
            for suite in ("LongBench", "RULER")
        ),
    }


@pytest.mark.parametrize(
    ("row", "status"),
    [
        (ppl_row("meta-llama/Meta-Llama-3-8B-Instruct", 1.5, 1.0, 2.0, text="WikiText-2"), "reproduced"),
        (ppl_row("meta-llama/Meta-Llama-3-8B-Instruct", 0.5, 0.0, 1.0, text="WikiText-2"), "differs"),
        (ppl_row("meta-llama/Meta-Llama-3-8B-Instruct", 1.5, 1.0, 2.0), "not comparable"),
        (ppl_row("smollm2-135m", 1.5, 1.0, 2.0), "not run here"),
        (ppl_row("smollm2-1.7b", 1.5, 1.0, 2.0), "not run here"),
    ],
)  # fmt: skip
def test_quality_is_compared_on_the_same_model_and_text_only(
    papers: Path, row: Row, status: str
) -> None:
    compared = paper_vs_ours([record(row)], papers).set_index(["row", "metric"])
    line = compared.loc[("WikiText-2, 1,837 tokens, 3 agents", "ppl_delta_pct")]
    assert line["status"] == status
    assert pd.isna(line["ours"]) == (status == "not run here")
    assert pd.isna(line["delta"]) == (status not in ("reproduced", "differs"))


def test_bertscore_of_another_encoder_is_not_in_the_papers_column(papers: Path) -> None:
    def answers(encoder: str) -> Record:
        dims = {"model": "llama-3-8b", "codec": "paper", "control": "pool", "n_agents": 3,
                "encoder": encoder, "rescaled": False}  # fmt: skip
        return record(Row(table="fidelity", metric="bertscore_f1", value=0.9, unit="F1", dims=dims))

    place = ("WikiText-2, 1,837 tokens, 3 agents", "bertscore_f1_mean")
    for encoder, status in (
        ("all-MiniLM-L6-v2", "not run here"),
        ("roberta-large", "not comparable"),
    ):
        compared = paper_vs_ours([answers(encoder)], papers).set_index(["row", "metric"])
        assert compared.loc[place]["status"] == status


def test_other_models_stand_beside_the_paper(papers: Path, synthetic: list[Record]) -> None:
    beside = same_protocol(synthetic, papers)
    assert set(beside["status"]) == {"not comparable"}
    assert set(beside["model (ours)"]) == {"smollm2-135m"}
    assert beside["delta"].isna().all()
    wikitext = beside[beside["row"].str.startswith("WikiText-2, 1,837")]
    assert wikitext["why"].str.contains("1,285 tokens in the pool; published with 1,285").all()


def test_own_tables_hold_each_setting_once(papers: Path, synthetic: list[Record]) -> None:
    found = tables.all_tables(synthetic, papers)
    ppl = found["ppl"].frame
    assert len(ppl) == 7 * 4
    assert ppl["n"].eq(12).all()
    assert {"ppl_delta_pct", "ppl_delta_pct lo", "ppl_delta_pct hi"} <= set(ppl.columns)
    assert found["decode_step"].frame.groupby("method")["n_agents"].nunique().eq(5).all()
    inversions = found["inversions"].frame
    assert inversions[["documents", "inverted"]].to_numpy().tolist() == [[12, 4]]


def test_files_are_written_in_three_forms(
    papers: Path, synthetic_root: Path, tmp_path: Path
) -> None:
    written = tables.write_all(synthetic_root, papers, tmp_path / "tables")
    names = {file.stem for file in written}
    assert names == set(tables.all_tables([], papers)), "every table has lines"
    for name in names:
        page = (tmp_path / "tables" / f"{name}.md").read_text()
        assert "nan" not in page.lower()
        assert "None" not in page
        assert not re.search(r"\| +\|", page), f"{name}: a blank cell"
        assert (tmp_path / "tables" / f"{name}.tex").read_text().count(r"\toprule") == 1
    rows = pd.read_csv(tmp_path / "tables" / "ppl.csv")
    assert rows["ppl_delta_pct"].dtype == float


def test_tables_without_results_are_the_papers_alone(papers: Path, tmp_path: Path) -> None:
    written = tables.write_all(tmp_path / "none", papers, tmp_path / "tables")
    assert {f.stem for f in written} == {"paper_vs_ours", "paper_vs_ours_eviction", "arithmetic"}
    assert "228 not run here" in tables.summary(tmp_path / "none", papers, tmp_path / "tables")


def test_a_table_without_data_is_removed_and_other_files_are_kept(
    papers: Path, synthetic_root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "tables"
    tables.write_all(synthetic_root, papers, out)
    (out / "ppl.txt").touch()
    (out / "mine.md").touch()
    tables.write_all(synthetic_root / "memory_scaling", papers, out)
    left = {file.name for file in out.iterdir()}
    assert not left & {"ppl.md", "ppl.csv", "ppl.tex"}
    assert {"ppl.txt", "mine.md", "pool_memory.md", "decode_step.csv"} <= left


def test_cells_are_short_and_never_blank() -> None:
    shown = [
        number(x) for x in (None, float("nan"), "", True, 12, 5035.0, 0.00512345, 12_345.6, "x")
    ]
    assert shown == ["-", "-", "-", "yes", "12", "5,035", "0.005123", "12,346", "x"]
    frame = pd.DataFrame({"a_b": [1.5, 2.5], "a_b lo": [1.0, None], "a_b hi": [2.0, None]})
    assert "1.5 [1, 2]" in markdown(frame)
    assert "| 2.5 " in markdown(frame)
    assert r"a\_b" in latex(frame)


def test_a_headline_of_two_profiles_shows_the_one_of_more_items() -> None:
    dims = {"model": "m", "suite": "offline", "question": "hidden", "keep": 0.25, "method": "ours",
            "family": "macro", "codec": "full"}  # fmt: skip

    def gap(value: float, n: int, **other: object) -> Row:
        return Row(table="recovery", metric="gap_recovered_pct", value=value, unit="%", n=n,
                   dims=dims | other)  # fmt: skip

    few, many = record(gap(90.0, 9), profile="few"), record(gap(94.0, 42), profile="many")
    shown = headlines(tidy([many, few]))
    assert shown["ours"].tolist() == ["94"]
    assert "--profile many" in shown["command"].iloc[0]
    elsewhere = record(gap(80.0, 9, suite="ruler"), profile="few")
    assert sorted(headlines(tidy([many, elsewhere]))["ours"]) == ["80", "94"]


def test_each_headline_has_a_command(synthetic: list[Record]) -> None:
    found = headlines(tidy(synthetic))
    assert found["what"].is_unique
    assert len(found) == len(HEADLINES)
    assert found["command"].str.fullmatch(r"`polykv run --profile synthetic --only \w+`").all()
    assert "4,096 tokens in the pool" in found["setting"].str.cat()


def test_readme_is_filled_between_its_markers(synthetic: list[Record], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{tables.BEGIN}\nstale\n{tables.END}\nbelow\n")
    for _ in range(2):
        tables.fill_readme(readme, synthetic)
        head, table, tail = re.split(r"<!-- results:\w+ -->", readme.read_text())
        assert (head, tail) == ("above\n", "\nbelow\n")
        assert "stale" not in table
        assert table.count("polykv run") == len(HEADLINES)
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="has no lines <!-- results:begin -->"):
        tables.fill_readme(readme, synthetic)


def test_tables_and_figures_never_import_torch() -> None:
    code = (
        "import sys; from polykv_lib.study import tables, figures; sys.exit('torch' in sys.modules)"
    )
    assert (
        run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode
        == 0
    )
