import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from benchmark.errors import ConfigurationError
from benchmark.report.published import READINGS
from benchmark.report.reproduction import write_notes
from benchmark.tables.frame import LONG_COLUMNS, read_long_frame
from benchmark.tables.layout import load_table

ROOT = Path(__file__).parents[3]

PAPER = """paper,table,dataset,setting,backbone,method,metric,value,std
pFedPG,1,Office-Caltech10,avg over domains,ViT-B/16,FedVPT,accuracy,94.29,
pFedPG,1,Office-Caltech10,avg over domains,ViT-B/16,SingleSet-Full,accuracy,84.90,
pFedPG,1,CIFAR-10,dir0.1,ViT-B/16,FedVPT,accuracy,80.00,
"""
SIZES = """paper,table,dataset,setting,backbone,method,metric,value,std
pFedPT,10,CIFAR-10,dataset statistics,,,train size,50000,
"""
TABLE = """
title: One table
paper: [results/paper/one.csv]
presets:
  demo: {seeds: [0], data: [{name: digits, label: Digits}]}
  paper: {seeds: [0, 1], note: Shorter., data: [{name: office, label: Office}]}
rows: [{label: FedVPT, name: fedvpt, point: server, configs: [x.yaml]}]
"""


def test_tables_read_each_published_number_as_its_metric_says() -> None:
    compared = 0
    for path in sorted((ROOT / "configs" / "tables").glob("*.yaml")):
        table = load_table(str(path))
        for preset in table.presets.values():
            for column in (column for group in preset.data for column in group.columns):
                if column.paper is not None and column.paper.metric in READINGS and column.client is None:
                    assert (column.statistic, table.summary) == READINGS[column.paper.metric], (path, column)
                    compared += 1
    assert compared > 50


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results"
    (folder / "paper").mkdir(parents=True)
    (folder / "paper" / "one.csv").write_text(PAPER)
    (folder / "paper" / "sizes.csv").write_text(SIZES)
    (folder / "tables").mkdir()
    (tmp_path / "configs" / "tables").mkdir(parents=True)
    (tmp_path / "configs" / "tables" / "first.yaml").write_text(TABLE)
    kept = folder / "runs" / "fedvpt_office_caltech10"
    shutil.copytree(ROOT / "results" / "runs" / kept.name, kept)
    (folder / "REPRODUCTION.template.md").write_text(
        "# Notes\n\n{{summary}}\n\n{{table one}}\n\nBy hand.\n\n{{table sizes}}\n"
    )
    return folder


def test_what_was_not_run_says_so_and_runs_nearby_are_named(results: Path) -> None:
    text = write_notes().read_text()
    assert text.startswith("<!-- Made by `benchmark reproduction`")
    assert "| pFedPG Table 1 | 3 | not run yet | demo not run yet | 1 |" in text
    assert "| pFedPT Table 10 | 1 sizes | nothing to run | | |" in text
    assert (
        "3 numbers, 2 methods, 2 settings ([one.csv](paper/one.csv)). The paper's accuracy is averaged over clients"
        in text
    )
    assert "averaged over clients, last round: 90.64 after aggregation" in text
    assert "pooled over all test images, last round: " in text
    assert "- `benchmark table first --preset paper`: **not run yet**." in text
    row = next(line for line in text.splitlines() if "`fedvpt_office_caltech10`" in line)
    for part in (
        "one domain a client",
        "112 px, 10 rounds, 1 local epoch, batches of 64, seed 0",
        "90.64 after aggregation",
        "94.29 (ViT-B/16)",
    ):
        assert part in row
    assert "80.00" not in text  # another data set
    assert "By hand." in text
    assert "{{" not in text


def test_a_run_that_was_kept_twice_is_named_once(results: Path) -> None:
    once = write_notes().read_text()
    kept = results / "runs" / "fedvpt_office_caltech10"
    shutil.copytree(kept, kept.with_name("later_again"))
    assert write_notes().read_text() == once


def test_published_numbers_without_a_tables_number_are_called_by_their_source(results: Path) -> None:
    (results / "paper" / "sizes.csv").write_text(SIZES.replace("pFedPT,10", "TRIP,PACS (README)"))
    assert "| TRIP, PACS (README) | 1 sizes | nothing to run | | |" in write_notes().read_text()


def test_a_table_that_was_made_says_how_far_it_is_from_the_paper(results: Path) -> None:
    shared = {"kind": "column", "dataset": "Office", "method": "FedVPT", "rounds": "100", "seeds": 2}
    shared |= {"asked": 2, "finished": 2, "codes": 1}
    lines = [
        shared | {"column": "A", "ours": 90.0, "paper": 94.0, "difference": -4.0},
        shared | {"column": "C", "ours": 93.0, "paper": 92.0, "difference": 1.0},
        shared | {"column": "D", "ours": 50.0},
        shared | {"column": "A", "method": "FedAvg", "error": "no memory"},
        shared | {"kind": "statistic", "column": "average", "ours": 1.0},
        {"kind": "note", "column": "Shorter."},
    ]
    frame = pd.DataFrame(lines).assign(rows=len(lines)).reindex(columns=list(LONG_COLUMNS))
    frame.to_csv(results / "tables" / "first_paper.csv", index=False)
    text = write_notes().read_text()
    line = next(line for line in text.splitlines() if "first --preset paper" in line)
    assert line.removeprefix("- `benchmark table first --preset paper` ") == (
        "(2 seeds, 100 rounds): [results](tables/first_paper.md); 2 numbers beside the paper's: mean difference -1.50, "
        "mean distance 2.50, farthest FedVPT, Office, A: 90.00 against 94.00. Shorter. 1 of its lines have failed runs."
    )
    assert "| pFedPG Table 1 | 3 | run | demo not run yet | 1 |" in text
    (results / "tables" / "first_paper.csv").write_text("table\nx\n")
    with pytest.raises(ConfigurationError, match=r"first_paper\.csv is not a table's CSV"):
        write_notes()


def test_every_published_table_needs_its_place(results: Path) -> None:
    template = results / "REPRODUCTION.template.md"
    text = template.read_text()
    for changed, name in [
        (text.replace("{{table sizes}}", ""), "sizes"),
        (text + "{{table two}}\n", "two"),
        (text + "{{table one}}\n", "one"),
    ]:
        template.write_text(changed)
        with pytest.raises(ConfigurationError, match=f"missing, unknown or twice: .*{name}"):
            write_notes()
    template.unlink()
    with pytest.raises(ConfigurationError, match=r"template\.md is missing"):
        write_notes()


def test_the_committed_template_has_every_published_table() -> None:
    text = (ROOT / "results" / "REPRODUCTION.template.md").read_text()
    assert sorted(re.findall(r"\{\{table (\w+)\}\}", text)) == sorted(
        path.stem for path in (ROOT / "results" / "paper").glob("*.csv")
    )


def test_a_part_of_a_tables_csv_is_refused(results: Path) -> None:
    whole = (Path(__file__).parents[3] / "results/tables/table1_demo.csv").read_bytes()
    path = results / "tables" / "first_paper.csv"
    path.write_bytes(whole)
    assert len(read_long_frame(path)) == whole.count(b"\n") - 1
    cuts = [len(whole) * part // 12 for part in range(12)] + [len(whole) - 1, whole.rindex(b"\n", 0, -1) + 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ConfigurationError, match=r"first_paper\.csv is not a table's CSV of this version"):
            read_long_frame(path)


@pytest.mark.parametrize("column", ["low", "pairs", "seeds", "seconds", "bytes_up", "asked", "method"])
def test_a_tables_csv_with_words_for_numbers_or_without_a_method_is_refused(results: Path, column: str) -> None:
    table = pd.read_csv(Path(__file__).parents[3] / "results/tables/table1_demo.csv", dtype="str")
    path = results / "tables" / "first_paper.csv"
    table.assign(**{column: None if column == "method" else "many"}).to_csv(path, index=False)
    with pytest.raises(ConfigurationError, match=r"first_paper\.csv is not a table's CSV of this version"):
        read_long_frame(path)
