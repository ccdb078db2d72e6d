"""Metrics by subgroup: numbers of twelve images by hand, values that are not defined, and files not to be trusted."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded_results import HOSTILE, kept_images, write_run
from refusal import refused

from benchmark.commands import main as command
from benchmark.errors import ConfigurationError
from benchmark.metrics import STATISTICS
from benchmark.records.group_fairness import MOST_CLASSES, STATED, GroupFairness, columns_of, group_fairness
from benchmark.records.grouped_runs import read_run
from benchmark.records.predictions import bytes_of
from benchmark.records.stored_run import StoredRun
from benchmark.records.subgroups import (
    COLUMNS,
    MOST_COLUMNS,
    MOST_SUBGROUPS,
    NOT_GIVEN,
    parse_subgroups,
    subgroups_parquet_of,
)
from benchmark.report.page import write_report
from benchmark.report.scored import scored_images

ACCURACIES = [0.6, 0.5, 2 / 3]
EVEN, ODD = [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]
#: Sites are the clients of these images, whose metrics are known from elsewhere.
GIVEN = {"sex": {"F": EVEN, "M": ODD}, "site": {"2": [0, 1, 2, 3, 4], "10": [5, 6, 7, 8], NOT_GIVEN: [9, 10, 11]}}


def written(folder: Path, **given: Any) -> StoredRun:
    given = {"kept": kept_images(), "subgroups": GIVEN, **given}
    write_run(folder, "FedVPT", 0, ACCURACIES, **given)
    return StoredRun(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    return written(tmp_path_factory.mktemp("runs") / "a")


def values(made: GroupFairness, metric: str) -> list[float | None]:
    return [each.values[metric] for each in made.subgroups.values()]


def test_two_subgroups_have_the_numbers_made_by_hand(run: StoredRun) -> None:
    """F: labels 0 2 0 0 1 2, predicted 0 2 2 1 2 0; M: labels 1 1 0 1 2 2, predicted 1 0 0 1 2 2."""
    assert columns_of(run) == ["sex", "site"]
    made = group_fairness(run, "sex", "server")
    assert [*made.subgroups] == ["F", "M"]
    assert [each.images for each in made.subgroups.values()] == [6, 6]
    assert values(made, "accuracy") == pytest.approx([2 / 6, 5 / 6])
    assert values(made, "balanced_accuracy") == pytest.approx([(1 / 3 + 0 + 1 / 2) / 3, (1 + 2 / 3 + 1) / 3])
    assert made.subgroups["F"].support == (3, 1, 2)
    assert made.subgroups["F"].sensitivity == pytest.approx((1 / 3, 0, 1 / 2))
    assert made.subgroups["M"].sensitivity == pytest.approx((1, 2 / 3, 1))
    assert made.gaps == pytest.approx((2 / 3, 2 / 3, 1 / 2))
    found = made.statistics("accuracy")
    assert found == pytest.approx(
        {"average": 7 / 12, "worst": 1 / 3, "worst_decile": 1 / 3, "std": 0.5 / 2**0.5, "gini": 0.5 / (4 * 7 / 12)}
    )
    assert made.whole.images == 12
    assert made.whole.values["accuracy"] == pytest.approx(7 / 12)


def test_subgroups_that_are_clients_have_what_clients_have(run: StoredRun) -> None:
    made = group_fairness(run, "site", "server")
    assert [*made.subgroups] == ["2", "10", NOT_GIVEN]
    assert values(made, "accuracy") == pytest.approx(ACCURACIES)
    assert values(made, "ece") == pytest.approx([0.391296, 0.356524, 0.294127], abs=1e-6)
    auroc, ap = values(made, "auroc"), values(made, "ap")
    assert auroc[:2] == pytest.approx([0.944444, 0.875], abs=1e-6)
    assert ap[:2] == pytest.approx([0.944444, 0.916667], abs=1e-6)
    assert (auroc[2], ap[2]) == (None, None)  # one class alone
    assert made.statistics("auroc")["average"] == pytest.approx(0.909722, abs=1e-6)  # over the two that have one
    found = made.statistics("accuracy")
    assert (found["std"], found["gini"]) == pytest.approx((0.083887, 0.062893), abs=1e-6)
    for name in STATED:
        of = STATISTICS[name].of
        assert of is not None
        assert found[name] == pytest.approx(of(np.array(ACCURACIES), False))
    assert made.statistics("ece")["worst"] == pytest.approx(0.391296, abs=1e-6)  # the largest error
    assert made.whole.values == pytest.approx(
        {"accuracy": 7 / 12, "balanced_accuracy": 7 / 12, "auroc": 0.916667, "ap": 0.873611, "ece": 0.355413}, abs=1e-6
    )


def test_a_class_that_a_subgroup_lacks_has_no_sensitivity_there_and_no_gap(run: StoredRun) -> None:
    made = group_fairness(run, "site", "server")
    assert made.subgroups["10"].sensitivity == (0.5, 0.5, None)
    assert made.subgroups[NOT_GIVEN].sensitivity == (None, None, pytest.approx(2 / 3))
    assert made.gaps == (None, None, None)
    said = " ".join(made.remarks)
    assert "AUROC and AP do not rank the groups" in said
    assert "2 over 3 classes: 0, 1, 2 and 10 over 2 classes: 0, 1" in said
    assert "Statistics of AUROC and AP are over the groups in which it is defined." in said
    assert "A class of which a group has no image has no gap." in said


def test_gaps_and_means_follow_min_support(tmp_path: Path) -> None:
    """F has one image of class 1, and M one of class 0."""
    made = group_fairness(written(tmp_path / "a", data={"min_support": 2}), "sex", "server")
    assert made.gaps == (None, None, 0.5)
    assert [each.averaged for each in made.subgroups.values()] == [(0, 2), (1, 2)]
    assert "A class of which a group has fewer than 2 images has no gap." in [*made.remarks]


def test_images_of_other_splits_count_for_nothing_and_may_be_of_other_subgroups(tmp_path: Path) -> None:
    kept = kept_images()
    more = kept.assign(split="val", image=kept["image"] + 20)
    subgroups = {"sex": {**GIVEN["sex"], "X": range(20, 32)}}
    found = written(tmp_path / "a", kept=pd.concat([kept, more], ignore_index=True), subgroups=subgroups)
    made = group_fairness(found, "sex", "server")
    assert [*made.subgroups] == ["F", "M"]
    with pytest.raises(ConfigurationError, match="stored no predictions of test images after local training"):
        group_fairness(found, "sex", "local")


def test_an_image_without_a_prediction_is_wrong_and_leaves_no_ranking(tmp_path: Path) -> None:
    kept = kept_images()
    kept.at[0, "logits"], kept.loc[0, "prediction"] = (float("nan"), 0.0, 0.0), -1
    made = group_fairness(written(tmp_path / "a", kept=kept), "sex", "server")
    assert made.subgroups["F"].sensitivity[0] == 0
    assert [values(made, name)[0] for name in ("auroc", "ap", "ece")] == [None] * 3
    assert values(made, "accuracy") == pytest.approx([1 / 6, 5 / 6])


def cells(said: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in said.splitlines() if line.startswith("│")]


def test_show_prints_two_tables(
    run: StoredRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert command(["show", str(run.folder), "--subgroups", "site"]) == 0
    said = capsys.readouterr().out
    rows = {row[0]: row[1:] for row in cells(said)[:8]}
    assert rows["2"] == ["5", "41.7", "60.00", "66.67", "0.9444", "0.9444", "0.3913"]
    assert rows[NOT_GIVEN] == ["3", "25.0", "66.67", "66.67", "", "", "0.2941"]
    assert rows["all images"][:3] == ["12", "100.0", "58.33"]
    assert rows["average"][:3] == ["", "", "58.89"]
    assert rows["worst group"][2:] == ["50.00", "50.00", "0.8750", "0.9167", "0.3913"]
    assert rows["spread"][2] == "8.39"
    assert rows["Gini"][2] == "0.0629"
    assert "worst decile" not in said  # of three it is the worst
    of_classes = cells(said)[8:]
    assert of_classes == [
        ["2", "50.00 (2)", "50.00 (2)", "100.00 (1)"],
        ["10", "50.00 (2)", "50.00 (2)", ""],
        [NOT_GIVEN, "", "", "66.67 (3)"],
        ["all images", "50.00 (4)", "50.00 (4)", "75.00 (4)"],
        ["gap", "", "", ""],
    ]
    assert "test images after aggregation by site" in said
    assert "Images of round 2, of all clients together" in said


def test_what_a_file_says_steers_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subgroups = {"sex\x1b[2J": {"\x1b[31mF": EVEN, "M\nM": ODD}}
    written(tmp_path / "a", subgroups=subgroups)
    assert command(["show", str(tmp_path / "a"), "--subgroups", "sex\x1b[2J"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in refused(capsys, command, ["show", str(tmp_path / "a"), "--subgroups", "age"])


def test_wrong_uses_are_told_in_one_line(run: StoredRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, command, ["show", str(run.folder), "--subgroups", "sexe"])
    assert "there is no column 'sexe' (did you mean sex?); columns are sex, site" in line
    written(tmp_path / "without", subgroups=None)
    line = refused(capsys, command, ["show", str(tmp_path / "without"), "--subgroups", "sex"])
    assert "has no subgroups.parquet: it was run without data.subgroups; run it again with" in line
    written(tmp_path / "few", subgroups={"sex": {"F": EVEN}})
    line = refused(capsys, command, ["show", str(tmp_path / "few"), "--subgroups", "sex"])
    assert "subgroups.parquet has no sex of image 1, which was scored" in line


def table(**columns: Any) -> bytes:
    given = {"column": ["sex", "sex"], "image": [0, 1], "value": ["F", "M"], **columns}
    return bytes_of(pa.table({name: pa.array(values) for name, values in given.items() if values is not None}))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"value": None}, "it has the columns column, image, not column, image, value"),
        ({"more": [1, 2]}, "it has the columns column, image, value, more"),
        ({"image": ["0", "1"]}, "its column image is of type string"),
        ({"image": [0.0, 1.0]}, "its column image is of type double"),
        ({"value": [1, 2]}, "its column value is of type int64"),
        ({"value": [["F"], ["M"]]}, "its column value is of type list"),
        ({"value": ["F", None]}, "a row has no value"),
        ({"image": [0, 0]}, "it has an image twice in a column"),
    ],
)
def test_another_ones_file_is_refused(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_subgroups(table(**columns))


def test_a_file_of_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {str(number): [number] for number in range(MOST_SUBGROUPS + 1)}
    with pytest.raises(ValueError, match="a column has 51 values; at most 50 are read"):
        parse_subgroups(subgroups_parquet_of({"id": many}))
    with pytest.raises(ValueError, match="it has 21 columns of an index; at most 20 are read"):
        parse_subgroups(subgroups_parquet_of({str(number): {"F": [0]} for number in range(MOST_COLUMNS + 1)}))
    with pytest.raises(ValueError, match="Parquet"):
        parse_subgroups(b"PAR1")
    content = subgroups_parquet_of({"sex": {"F": [0] * 30_000}})
    monkeypatch.setattr("benchmark.records.predictions.MOST_ROWS", 1000)
    with pytest.raises(ValueError, match="it has 30,000 rows; at most 1,"):
        parse_subgroups(content)


def test_a_long_value_is_held_once(tmp_path: Path) -> None:
    """Parquet stores a text once, however often it comes; read as plain texts, a small file could fill the memory."""
    columns = {"column": ["sex"] * 1000, "image": range(1000), "value": ["F", "M"] * 500}
    whole = pa.table({name: pa.array(values) for name, values in columns.items()})
    pq.write_table(whole, tmp_path / "a.parquet", store_schema=False)
    found = parse_subgroups((tmp_path / "a.parquet").read_bytes())
    assert found["value"].dtype == "category"
    assert tuple(found.columns) == COLUMNS


def test_the_same_subgroups_give_the_same_bytes_in_the_order_of_their_values() -> None:
    content = subgroups_parquet_of(GIVEN)
    assert content == subgroups_parquet_of({name: {**of} for name, of in GIVEN.items()})
    found = parse_subgroups(content)
    assert found["image"].tolist() == [*EVEN, *ODD, *range(12)]
    assert found["value"].unique().tolist() == ["F", "M", "2", "10", NOT_GIVEN]


def test_the_page_shows_them(tmp_path: Path) -> None:
    written(tmp_path / "runs" / "a")
    (made,) = scored_images("FedVPT", read_run(tmp_path / "runs" / "a"))
    assert [each.column for each in made.subgroups] == ["sex", "site"]
    page = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    text = page.partition("<h3>Subgroups</h3>")[2].partition("<h3>Runs</h3>")[0]
    assert text.count("<table") == 4
    assert "<details open><summary>sex: FedVPT, seed 0, after aggregation</summary>" in text
    assert "<span>33.33<small>3 images</small></span>" in text
    assert HOSTILE not in text
    assert "AUROC and AP do not rank the groups" in text
    written(tmp_path / "other" / "b", subgroups=None)
    page = write_report(tmp_path / "page.html", tmp_path / "other", tmp_path / "other").path.read_text()
    assert "Stored predictions" in page
    assert "Subgroups" not in page


def test_of_many_classes_no_sensitivity_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = kept_images()
    kept["logits"] = [(*row, *[-9.0] * (MOST_CLASSES - 2)) for row in kept["logits"]]
    made = group_fairness(written(tmp_path / "a", kept=kept), "sex", "server")
    assert "Sensitivities of more than 10 classes are not shown." in [*made.remarks]
    assert command(["show", str(tmp_path / "a"), "--subgroups", "sex"]) == 0
    assert "gap" not in capsys.readouterr().out.partition("Images of round")[0]
