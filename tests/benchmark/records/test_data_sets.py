"""Means over the data sets of a federation, on numbers made by hand, and what a table shows of a finished run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from finished_run import write_finished_run
from recorded_results import record_of

from benchmark.metrics import STATISTICS
from benchmark.records.data_sets import data_sets_of
from benchmark.records.metrics_table import COLUMNS
from benchmark.records.record import RunRecord
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import StoredRun, read_metrics
from benchmark.records.summary import statistic_of, summarize

NAMES = ("digits", "letters 0", "letters 1", "letters 10", "digits (whole)", "letters (whole)")
VALUES = {1: [0.5, 0.1, 0.2, 0.9, None, None], 2: [0.6, 0.9, 0.8, 0.4, None, None]}


def table(values: dict[int, list[float | None]], split: str = "test") -> pd.DataFrame:
    """Accuracies from {round: one value per client, None where there is no row}."""
    rows = [
        (number, client, "server", split, "accuracy", value)
        for number, row in values.items()
        for client, value in enumerate(row)
        if value is not None
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def several(
    names: tuple[str, ...] = NAMES, dataset: str = "digits+letters", sizes: tuple[int, ...] = (10, 10, 10, 10, 0, 0)
) -> RunRecord:
    return dataclasses.replace(
        record_of(), dataset=dataset, setting="classes of data sets", client_names=names, test_sizes=sizes
    )


def of_data_sets(
    metrics: pd.DataFrame,
    record: RunRecord,
    split: str = "test",
    which: str = "last",
    statistic: str = "by_data_set",
    train_sizes: tuple[int, ...] | None = None,
) -> float | None:
    record = dataclasses.replace(record, summary=summarize(metrics, record.test_sizes))
    return statistic_of(metrics, record, "server", split, "accuracy", which, statistic, train_sizes)


def test_clients_are_of_the_data_set_that_they_are_named_after() -> None:
    assert data_sets_of(several()) == ["digits", "letters", "letters", "letters", "digits", "letters"]
    nested = ("A", "A 1", "A 1 0", "A (whole)")
    assert data_sets_of(several(nested, "A+A 1")) == ["A", "A 1", "A 1", "A"]


@pytest.mark.parametrize(
    ("names", "dataset"),
    [(NAMES, "digits"), (("digits", "Letters 0"), "digits+letters"), (("digits", "letters x"), "digits+letters")],
)
def test_clients_of_one_data_set_or_of_none_have_none(names: tuple[str, ...], dataset: str) -> None:
    assert data_sets_of(several(names, dataset)) is None


def test_each_data_set_counts_once() -> None:
    # Last round: digits 0.6, letters (0.9 + 0.8 + 0.4) / 3 = 0.7; the round before: 0.5 and 0.4.
    assert of_data_sets(table(VALUES), several()) == pytest.approx(0.65)
    assert of_data_sets(table(VALUES), several(), which="last10") == pytest.approx((0.65 + 0.45) / 2)
    assert summarize(table(VALUES), several().test_sizes)["server"]["test"]["accuracy"]["last"]["average"] == (
        pytest.approx(0.675)
    )


def test_a_client_without_a_value_is_left_out_and_so_is_a_data_set_of_such() -> None:
    fewer = several(sizes=(10, 10, 0, 10, 0, 0))
    assert of_data_sets(table({2: [0.6, 0.9, None, 0.4, None, None]}), fewer) == pytest.approx((0.6 + 0.65) / 2)
    letters = several(sizes=(0, 10, 10, 10, 0, 0))
    assert of_data_sets(table({2: [None, 0.9, 0.8, 0.4, None, None]}), letters) == pytest.approx(0.7)


def test_of_testers_it_is_their_average() -> None:
    both = pd.concat([table(VALUES), table({2: [None] * 4 + [0.3, 0.5]}, split="base")], ignore_index=True)
    assert of_data_sets(both, several(), "base") == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("trained", "of_trained", "of_untrained"),
    [
        ((True, False, True, False, None, None), (0.6 + 0.8) / 2, (0.9 + 0.4) / 2),
        ((True,) * 4 + (None,) * 2, (0.6 + 0.9 + 0.8 + 0.4) / 4, None),
        (None, None, None),
        ((False,) * 4 + (None,) * 2, None, (0.6 + 0.9 + 0.8 + 0.4) / 4),
    ],
)
def test_clients_that_never_trained_have_a_mean_of_their_own(
    trained: tuple[bool | None, ...] | None, of_trained: float | None, of_untrained: float | None
) -> None:
    record = dataclasses.replace(several(), trained=trained)
    assert of_data_sets(table(VALUES), record, statistic="trained") == pytest.approx(of_trained)
    assert of_data_sets(table(VALUES), record, statistic="untrained") == pytest.approx(of_untrained)


@pytest.mark.parametrize(
    ("sizes", "fewest", "medium", "most"),
    [
        ((50, 20, 30, 40, 0, 0), 0.9, (0.8 + 0.4) / 2, 0.6),  # by size: the clients with 0.9, 0.8, 0.4 and 0.6
        ((9, 9, 9, 9, 9, 9), 0.6, (0.9 + 0.8) / 2, 0.4),  # the last two are not tested
        ((7, 0, 5, 0, 0, 0), 0.8, None, 0.6),
        ((7, 0, 0, 0, 0, 0), None, 0.6, None),
        (None, None, None, None),
    ],
)
def test_thirds_of_the_clients_by_training_images_have_means(
    sizes: tuple[int, ...] | None, fewest: float | None, medium: float | None, most: float | None
) -> None:
    names = ("fewest", "medium", "most")
    found = [of_data_sets(table(VALUES), several(), statistic=name, train_sizes=sizes) for name in names]
    assert found == [None if each is None else pytest.approx(each) for each in (fewest, medium, most)]


def test_thirds_have_no_client_that_never_trained() -> None:
    """Of those with 20 and 30 images, the first alone took part; which third is whose does not change."""
    record = dataclasses.replace(several(), trained=(True, True, False, True, None, None))
    found = [
        of_data_sets(table(VALUES), record, statistic=name, train_sizes=(50, 20, 30, 40, 0, 0))
        for name in ("fewest", "medium", "most")
    ]
    assert found == [pytest.approx(each) for each in (0.9, 0.4, 0.6)]


@pytest.mark.parametrize(
    ("counts", "sizes"),
    [
        ([[3, 2], [0, 1], [4, 0]], [5, 1, 4]),
        ([5, 1, 4], [5, 1, 4]),  # of the sites of a deployment
        ([[3, 2], None, [4, 0]], None),
        ([[3, 2]], None),
    ],
)
def test_training_images_are_counted_in_the_kept_partition(
    tmp_path: Path, counts: list[Any], sizes: list[int] | None
) -> None:
    record = dataclasses.replace(record_of(), client_names=("a", "b", "c"), test_sizes=(10, 10, 10))
    write_finished_run(tmp_path, record, table({2: [0.6, 0.9, 0.8]}), "run_dir: here\n")
    (tmp_path / "manifest.json").unlink()
    named = [("train_size" if isinstance(each, int) else "train_classes", each) for each in counts]
    clients = [{"name": name, key: each} for name, (key, each) in zip("abc", named, strict=False)]
    (tmp_path / "partition.json").write_text(json.dumps({"clients": clients}))
    run = StoredRun(tmp_path)
    assert run.train_sizes == sizes
    assert run.statistic("server", "test", "accuracy", "last", "fewest") == (None if sizes is None else 0.9)


def test_clients_that_can_never_train_count_in_neither_mean() -> None:
    both = pd.concat([table(VALUES), table({2: [None] * 4 + [0.3, 0.5]}, split="base")], ignore_index=True)
    record = dataclasses.replace(several(), trained=(True, True, False, True, None, None))
    assert [of_data_sets(both, record, "base", statistic=name) for name in ("trained", "untrained")] == [None, None]


def test_a_run_on_one_data_set_has_no_such_mean() -> None:
    assert of_data_sets(table(VALUES), several(dataset="digits")) is None


def test_no_record_holds_it_and_a_table_reads_it_of_any_run(tmp_path: Path) -> None:
    assert not STATISTICS["by_data_set"].always
    config = "seed_everything: 3\ntrainer: {max_epochs: 2}\nrun_dir: here\n"
    write_finished_run(tmp_path / "run", several(), table(VALUES), config)
    record = read_record(tmp_path / "run")
    assert "by_data_set" not in record.summary["server"]["test"]["accuracy"]["last"]
    metrics = read_metrics(tmp_path / "run")
    found = statistic_of(metrics, record, "server", "test", "accuracy", "last", "by_data_set")
    assert found == pytest.approx(0.65)
