"""Columns of what clients gain over a row of the table, on numbers computed by hand."""

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from finished_run import write_finished_run
from recorded_results import record_of

from benchmark.cells.outcome import Outcome
from benchmark.errors import ConfigurationError
from benchmark.metrics import GAINS, gains
from benchmark.records.metrics_table import COLUMNS
from benchmark.tables.by_seed import by_seed
from benchmark.tables.cells import make_cells
from benchmark.tables.layout import DataGroup, load_table
from benchmark.tables.render import Rendered, markdown_block, render
from benchmark.tuning.tune import _with_gains_over

COLUMNS_ASKED: list[dict[str, Any]] = [
    {"statistic": "average", "label": "Avg"},
    {"statistic": "mean_gain"},
    {"statistic": "lowest_gain", "label": "Lowest"},
    {"statistic": "better_off"},
    {"statistic": "worse_off"},
    {"statistic": "lowest_gain", "over": "Alpha"},
    {"statistic": "lowest_gain", "label": "Loss", "metric": "loss"},
]
#: accuracies of three clients, by row and seed
ACCURACIES = {
    ("Local", 0): [0.5, 0.6, 0.7],
    ("Local", 1): [0.4, 0.8, 0.6],
    ("Alpha", 0): [0.6, 0.55, 0.7],  # gains 10, -5, 0
    ("Alpha", 1): [0.6, 0.9, 0.7],  # gains 20, 10, 10
    ("Beta", 0): [0.8, 0.6, 0.8],  # gains 30, 0, 10
}


def table(folder: Path, columns: list[dict[str, Any]], **preset: Any) -> Path:
    data = {"name": "rooms", "label": "Rooms", "columns": columns}
    rows = [
        {"label": name, "name": name.lower(), "point": "server", "configs": [f"{name}.yaml"]}
        for name in ("Local", "Alpha", "Beta")
    ]
    content = {"title": "Gains", "presets": {"demo": {"seeds": [0, 1], "data": [data], **preset}}, "rows": rows}
    for name in ("Local", "Alpha", "Beta"):
        (folder / f"{name}.yaml").write_text(f"name: {name}\n")
    file = folder / "gains.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def run(folder: Path, row: str, seed: int, **manifest: Any) -> Outcome:
    """A finished run whose loss is one minus its accuracy."""
    values = ACCURACIES[row, seed]
    rows = [(1, client, "server", "test", "accuracy", value) for client, value in enumerate(values)]
    rows += [(1, client, "server", "test", "loss", 1 - value) for client, value in enumerate(values)]
    record = record_of("abc", seed, method=row, dataset="Rooms", manifest_hash="", rounds=1, rounds_trained=1)
    record = replace(record, trained=(True, True, row != "Alpha"))
    manifest["clients"] = [
        {"name": name, "train_classes": [size, 0]} for name, size in zip("abc", (5, 3, 4), strict=True)
    ]
    write_finished_run(folder / f"{row}{seed}", record, pd.DataFrame(rows, columns=list(COLUMNS)), **manifest)
    return Outcome(folder / f"{row}{seed}")


def rendered(folder: Path, monkeypatch: pytest.MonkeyPatch, columns: list[dict[str, Any]], **manifest: Any) -> Rendered:
    """The table; the manifest's fields are those of Alpha's run with seed 1."""
    monkeypatch.chdir(folder)
    read = load_table(str(table(folder, columns)))
    preset = read.presets["demo"]
    cells = make_cells(read, "demo", preset)
    outcomes = {
        cell.name: run(folder, row, seed, **(manifest if (row, seed) == ("Alpha", 1) else {}))
        if (row, seed) in ACCURACIES
        else Outcome(None, "it failed")
        for (_, row, seed), cell in cells.items()
    }
    return render("gains", read, "demo", preset, cells, outcomes)


def numbers(made: Rendered) -> dict[tuple[str, str], tuple[float, float]]:
    frame = pd.read_csv(io.StringIO(made.csv)).query("kind == 'column'")
    return {(each.method, each.column): (each.ours, each.std) for each in frame.itertuples()}


def test_gains_are_of_the_same_client_seed_and_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = rendered(tmp_path, monkeypatch, COLUMNS_ASKED)
    found = numbers(made)
    spread = math.sqrt(2) / 2  # standard deviation of two numbers, by their distance

    def of_alpha(first: float, second: float) -> Any:
        return pytest.approx(((first + second) / 2, spread * abs(second - first)))

    assert found["Alpha", "Mean gain"] == of_alpha(5 / 3, 40 / 3)
    assert found["Alpha", "Lowest"] == of_alpha(-5, 10)
    assert found["Alpha", "% better off"] == of_alpha(100 / 3, 100)
    assert found["Alpha", "% worse off"] == of_alpha(100 / 3, 0)
    assert found["Alpha", "Loss"] == of_alpha(-0.05, 0.1)  # less is better
    assert found["Beta", "Lowest"] == pytest.approx((0.0, math.nan), nan_ok=True)  # of seed 0, which it has
    assert found["Beta", "Lowest gain over Alpha"] == pytest.approx((5.0, math.nan), nan_ok=True)
    assert all(math.isnan(found["Local", name][0]) for name in ("Mean gain", "Lowest", "% better off", "Loss"))
    assert found["Local", "Lowest gain over Alpha"] == of_alpha(-10, -20)
    assert "Gains over Local and Alpha: each client's number minus its own in that row's run" in made.markdown


def test_another_partition_gives_no_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = numbers(rendered(tmp_path, monkeypatch, COLUMNS_ASKED, algorithm="Another"))
    assert math.isnan(found["Alpha", "Lowest"][0])  # and no mean of the seeds that are left
    assert found["Alpha", "Avg"][0] == pytest.approx((100 * 1.85 / 3 + 100 * 2.2 / 3) / 2)


def test_a_metric_that_runs_lack_leaves_the_table_without_that_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rendered(
        tmp_path, monkeypatch, [*COLUMNS_ASKED[:2], {"statistic": "mean_gain", "metric": "auroc", "label": "Of AUROC"}]
    )
    assert not math.isnan(numbers(made)["Alpha", "Avg"][0])
    assert any("the run has no auroc on test" in problem and str(tmp_path) in problem for problem in made.problems)


def test_a_baseline_is_compared_seed_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirds by training images, of which clients have 5, 3 and 4; the third one never trained in Alpha."""
    file = table(tmp_path, COLUMNS_ASKED[:1])
    made = rendered(tmp_path, monkeypatch, COLUMNS_ASKED[:1])
    (block,) = by_seed(made.lines, replace(load_table(str(file)), baseline="Local"))
    said = markdown_block(block)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    assert cells == [
        ["Method", "Seed", "All", "Trained", "Fewest", "Medium", "Most", "Thirds"],
        ["Alpha", "0", "+1.67", "+2.50", "-5.00", "", "+10.00", ""],
        ["Alpha", "1", "+13.33", "+15.00", "+10.00", "", "+20.00", ""],
        ["Beta", "0", "+13.33", "+13.33", "+0.00", "+10.00", "+30.00", "rise"],
    ]


def test_a_table_without_such_columns_says_nothing_of_gains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Gains over" not in rendered(tmp_path, monkeypatch, COLUMNS_ASKED[:1]).markdown


@pytest.mark.parametrize(
    ("columns", "preset", "said"),
    [
        ([{"statistic": "lowest_gain", "over": "Gamma"}], {}, "lowest_gain is over the row 'Gamma', which is not run"),
        (
            [{"statistic": "mean_gain"}],
            {"rows": ["Alpha", "Beta"]},
            "'Local', which is not run here; give over: one of",
        ),
        ([{"statistic": "worst", "over": "Local"}], {}, "over: 'Local' is for the statistics mean_gain, lowest_gain, "),
        ([{"client": "a", "over": "Local"}], {}, "over: 'Local' is for the statistics mean_gain, lowest_gain, "),
        (
            [{"statistic": "mean_gain", "label": "G"}, {"label": "HM", "harmonic": ["G"]}],
            {},
            "no column 'G' stands left of the harmonic mean that names it",
        ),
        (
            [{"client": "a", "statistic": "mean_gain"}],
            {},
            "column of client 'a' shows its own value, not mean_gain over",
        ),
        (
            [{"client": "a", "statistic": "worst"}],
            {},
            "column of client 'a' shows its own value, not worst over clients",
        ),
        ([{"statistic": "gain"}], {}, "there is no statistic 'gain'; statistics are average, worst, "),
    ],
)
def test_columns_that_no_table_can_have_are_refused(
    columns: list[dict[str, Any]], preset: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as error:
        load_table(str(table(tmp_path, columns, **preset)))
    assert said in str(error.value)


def test_gains_leave_out_clients_without_a_value() -> None:
    values, others = np.array([1.0, np.nan, 3.0]), np.array([0.0, 0.0, np.inf])
    assert gains(values, others, "accuracy").tolist() == [1.0]
    assert gains(values[:1], others[:1], "loss").tolist() == [-1.0]
    assert [*GAINS] == ["mean_gain", "lowest_gain", "better_off", "worse_off"]


def test_tuned_tables_are_over_the_tuned_row(tmp_path: Path) -> None:
    read = load_table(str(table(tmp_path, COLUMNS_ASKED)))
    group: DataGroup = _with_gains_over(read.presets["demo"].data[0], lambda label: f"{label}, tuned")
    assert [column.gains_over for column in group.columns[:3]] == [None, "Local, tuned", "Local, tuned"]
