"""Columns of a table that show a value of one class, such as the sensitivity of melanoma."""

from pathlib import Path
from typing import Any

import pytest
from recorded_results import kept_images, write_run

from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.errors import ConfigurationError
from benchmark.files import write_json
from benchmark.records.class_values import class_values
from benchmark.records.predictions import PREDICTIONS
from benchmark.records.stored_run import stored_run
from benchmark.tables.layout import Table, load_table
from benchmark.tables.render import Rendered, render
from benchmark.tables.run_table import run_table

#: Of the twelve kept images (tests/three_clients.py): bike is label 0, mug 1, and the last class, here by its label, 2.
SENSITIVITY = {"metric": "sensitivity"}
COLUMNS: list[tuple[dict[str, Any], str, float]] = [
    # Two of amazon's images show a mug, one is found; likewise of dslr's; the third client has none.
    ({**SENSITIVITY, "of_class": "mug"}, "Avg, mug", 50.0),
    ({**SENSITIVITY, "of_class": "mug", "client": "dslr"}, "dslr, mug", 50.0),
    # Class 2: amazon finds one of one, the third client two of three; three of four of all images together.
    ({**SENSITIVITY, "of_class": "2"}, "Avg, 2", 100 * 5 / 6),
    ({**SENSITIVITY, "of_class": "2", "statistic": "worst"}, "Worst, 2", 100 * 2 / 3),
    ({**SENSITIVITY, "of_class": "2", "statistic": "pooled", "label": "All"}, "All", 75.0),
    # Called bikes: amazon's two, of which one is; dslr's one, which is; the third client's one, which is none.
    ({"metric": "ppv", "of_class": "bike"}, "Avg, bike", 50.0),
    ({"metric": "ppv", "of_class": "bike", "statistic": "worst"}, "Worst, bike", 0.0),
]


def table_of(columns: list[dict[str, Any]], **more: Any) -> str:
    """Write a table of one row and return the file's name."""
    group = {"name": "tiny", "label": "Tiny", "configs": ["configs/fedvpt_digits.yaml"], "columns": columns}
    content = {
        "title": "One run",
        "presets": {"demo": {"seeds": [0], "data": [group]}},
        "rows": [{"label": "FedAvg", "name": "fedavg", "point": "server", "configs": ["configs/fedvpt_digits.yaml"]}],
    }
    write_json(Path("one.yaml"), content | more)  # JSON is YAML
    return "one.yaml"


def rendered(table: Table, run: Path) -> Rendered:
    """The table of one cell, which this run has filled."""
    cells = {("tiny", "FedAvg", 0): Cell("cell", (), (), 0)}
    return render("one", table, "demo", table.presets["demo"], cells, {"cell": Outcome(run)})


@pytest.mark.parametrize("kept", [False, True], ids=["run", "kept copy"])
def test_columns_of_a_class_are_over_the_clients_that_have_it(
    kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    write_run(run, "FedAvg", 0, [0.6, 0.5, 2 / 3], kept=kept_images(), data={"metrics": "clinical"})
    if kept:
        (run / PREDICTIONS).unlink()  # as copies are
    table = load_table(table_of([column for column, _, _ in COLUMNS]))
    made = rendered(table, run)
    assert made.problems == []
    found = {number.column: number.value for number in made.lines[0].numbers if number.kind == "column"}
    assert found == pytest.approx({heading: value for _, heading, value in COLUMNS})


def test_a_run_without_values_by_class_says_so_in_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    write_run(run, "FedAvg", 0, [0.6, 0.5, 2 / 3])
    table = load_table(table_of([{**SENSITIVITY, "of_class": "mug"}]))
    made = rendered(table, run)
    (line,) = made.lines
    assert [error.endswith("has no values by class; give its runs --data.metrics=clinical") for error in line.errors]


def test_values_by_class_of_another_round_than_the_last_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    write_run(run, "FedAvg", 0, [0.6, 0.5, 2 / 3], kept=kept_images(), data={"keep_predictions": "best_on_val"})
    with pytest.raises(ConfigurationError, match=r"of the round that is best on val alone; .*keep_predictions=last"):
        class_values(stored_run(run), "server", "test", "sensitivity", "mug")


def test_columns_of_every_client_have_the_class_in_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of the table's metric, which are called by the client alone."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    write_run(run, "FedAvg", 0, [0.6, 0.5, 2 / 3], kept=kept_images(), data={"metrics": "clinical"})
    table = load_table(table_of([{"client": "*"}, {"client": "*", **SENSITIVITY, "of_class": "mug"}]))
    made = rendered(table, run)
    found = {number.column: number.value for number in made.lines[0].numbers if number.kind == "column"}
    assert [found["amazon"], found["amazon, mug"]] == pytest.approx([60.0, 50.0])
    assert [found["dslr"], found["dslr, mug"]] == pytest.approx([50.0, 50.0])
    assert len(found) == 6


def test_columns_of_every_client_keep_their_label_and_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "one"
    write_run(run, "FedAvg", 0, [0.6, 0.5, 2 / 3], kept=kept_images(), data={"metrics": "clinical"})
    of_mugs: dict[str, Any] = {**SENSITIVITY, "of_class": "mug"}
    table = load_table(table_of([{"client": "*"}, {"client": "*", "label": "Mugs", **of_mugs}]))
    made = rendered(table, run)
    found = {number.column: number.value for number in made.lines[0].numbers if number.kind == "column"}
    assert [found["amazon"], found["Mugs, amazon"]] == pytest.approx([60.0, 50.0])

    table = load_table(table_of([{"client": "*"}, {"client": "amazon", "label": "dslr"}]))
    with pytest.raises(ConfigurationError, match="tiny has two columns called 'dslr': give one another label"):
        rendered(table, run)


@pytest.mark.parametrize(
    ("column", "more", "said"),
    [
        (
            {"metric": "kappa"},
            {},
            "of single classes there are sensitivity, specificity, ppv, npv, auroc, ap; got kappa",
        ),
        ({}, {}, "got accuracy"),
        ({**SENSITIVITY, "statistic": "by_data_set"}, {}, "of a class's values there are average, .*; got by_data_set"),
        ({**SENSITIVITY, "statistic": "mean_gain", "over": "FedAvg"}, {}, "got mean_gain"),
        (SENSITIVITY, {"summary": "last10"}, "of_class is of the last round's images; give summary: last"),
    ],
)
def test_what_no_class_has_is_refused(
    column: dict[str, Any], more: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=said):
        load_table(table_of([{**column, "of_class": "mug"}], **more))


@pytest.mark.parametrize(
    ("named", "overrides", "said"),
    [
        (
            "melanoma",
            ["--data.metrics=clinical"],
            "Tiny has no class 'melanoma'; give one of zero, one, two",
        ),
        ("3", [], "no values by class of the last round; give these runs --data.metrics=clinical"),
        (
            "3",
            ["--data.metrics=clinical", "--data.keep_predictions=best_on_val", "--data.val_fraction=0.1"],
            "no values by class of the last round",
        ),
        ("3", ["--data.metrics=clinical", "--data.keep_predictions=none"], "no values by class"),
    ],
)
def test_a_class_that_runs_will_not_have_is_refused_before_any_starts(
    named: str, overrides: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = table_of([{**SENSITIVITY, "of_class": named}])
    content = (
        Path(name)
        .read_text()
        .replace('"seeds": [', f'"overrides": {str(overrides).replace(chr(39), chr(34))}, "seeds": [')
    )
    Path(name).write_text(content)
    with pytest.raises(ConfigurationError, match=said):
        run_table(name, jobs=1)
    assert not Path("runs").exists()
