"""A metric and a statistic that are added in one place go through a whole run: record, files, tables and words."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from federation import CONF, EACH_ROUND, build, fit
from sklearn.metrics import cohen_kappa_score
from three_clients import LABELS, LOGITS, scored
from torch import Tensor

from benchmark import commands
from benchmark.cells.identity import Cell
from benchmark.cells.outcome import Outcome
from benchmark.counts import Counts, ScoredBatch
from benchmark.engine.scores import ClientScores
from benchmark.errors import ConfigurationError
from benchmark.files import write_json
from benchmark.masked import IGNORE
from benchmark.metrics import METRICS, POOLED_CLIENT, STATISTICS, Metric, Statistic
from benchmark.records.metrics_table import read_table
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.records.summary import client_values, summarize
from benchmark.records.words import metric_number, metric_words
from benchmark.run.checkpoint import read_checkpoint
from benchmark.run.cli import main
from benchmark.run.recorder import Recorder
from benchmark.tables.layout import load_table
from benchmark.tables.render import render


class Confusion(Counts):
    """Images by true and predicted class; the last column is of those without a prediction."""

    name = "confusion"

    @staticmethod
    def shape(classes: int) -> tuple[int, ...]:
        """Return true by predicted classes."""
        return classes, classes + 1

    @staticmethod
    def count(batch: ScoredBatch) -> Tensor:
        """Count a batch, [K, C, C + 1]."""
        classes, there = batch.classes, batch.y != IGNORE
        place = batch.y.where(there, 0) * (classes + 1) + batch.predictions
        flat = place.new_zeros(len(place), classes * (classes + 1)).scatter_add_(1, place, there.long())
        return flat.view(-1, classes, classes + 1)


def kappa(confusion: Tensor) -> Tensor:
    """Return Cohen's kappa, (p_o - p_e) / (1 - p_e), [N]; NaN where all are expected to agree."""
    matrix = confusion.double()
    total = matrix.sum((1, 2))
    observed = matrix.diagonal(dim1=1, dim2=2).sum(1) / total
    expected = (matrix.sum(2) * matrix.sum(1)[:, :-1]).sum(1) / total**2
    return (observed - expected) / (1 - expected)


KAPPA = Metric("kappa", (Confusion,), kappa, pooled="counts", always_defined=False)
P10 = Statistic("p10", "p10", "10th percentile over clients", lambda values, _: float(np.percentile(values, 10)))


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add both, each by one entry."""
    monkeypatch.setitem(METRICS, "kappa", KAPPA)
    monkeypatch.setitem(STATISTICS, "p10", P10)


def test_kappa_of_three_clients_and_of_all_their_images_by_hand() -> None:
    scores = scored(chosen="basic")
    assert scores.compute()["kappa"].tolist() == pytest.approx([0.411765, 0.2, 0.0], abs=1e-6)
    assert scores.pooled() == {"kappa": pytest.approx(0.375)}
    assert scores.pooled()["kappa"] == pytest.approx(cohen_kappa_score(LABELS, np.argmax(LOGITS, 1)))
    together = ClientScores(3, 3)
    together.add((2, 0), scores.counted((2, 0)))
    together.add((1,), scores.counted((1,)))
    assert together.pooled() == scores.pooled()


def test_both_go_through_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "FedAvg.yaml")]
    main(["fit", *configs, "--trainer.max_epochs=2", "--run_dir=run"])
    run = Path("run")

    table = read_table(run / "metrics.parquet")
    last = table.query("metric == 'kappa' and point == 'server' and split == 'test' and round == 2")
    values = last.loc[last["client"] != POOLED_CLIENT, "value"]
    (pooled,) = last.loc[last["client"] == POOLED_CLIENT, "value"]
    assert set(table.loc[table["client"] == POOLED_CLIENT, "metric"]) == {"kappa"}

    record = read_record(run)
    entry = record.summary["server"]["test"]["kappa"]
    assert verify_record(run) == []
    assert entry["clients"] == len(values)
    assert entry["last"]["average"] == pytest.approx(values.mean())
    assert entry["last"]["p10"] == pytest.approx(np.percentile(values, 10))
    assert entry["last"]["pooled"] == pooled
    assert record.summary["server"]["test"]["accuracy"]["last"]["p10"] is not None

    monkeypatch.setenv("COLUMNS", "200")
    assert commands.main(["show", "run", "--metric", "kappa"]) == 0
    shown = capsys.readouterr().out
    assert "test kappa after aggregation " in shown  # and no unit
    assert " p10 " in shown
    assert (metric_words("test", "kappa", "local"), metric_number(0.5, "kappa")) == (
        "test kappa after local training",
        "0.5000",
    )

    frame = rendered(run, "kappa", [{"statistic": name} for name in ("average", "p10", "pooled")])
    assert [frame["Avg"], frame["P10"], frame["Pooled"]] == pytest.approx([values.mean(), entry["last"]["p10"], pooled])


def rendered(run: Path, metric: str, columns: list[dict[str, str]]) -> dict[str, float]:
    """Return the columns of a table of one run."""
    group = {"name": "tiny", "label": "Tiny", "configs": ["data.yaml"], "columns": columns}
    content = {
        "title": "One run",
        "metric": metric,
        "presets": {"demo": {"seeds": [3], "data": [group]}},
        "rows": [{"label": "FedAvg", "name": "fedavg", "point": "server", "configs": ["fedavg.yaml"]}],
    }
    write_json(Path("one.yaml"), content)  # JSON is YAML
    table = load_table("one.yaml")
    cells = {("tiny", "FedAvg", 3): Cell("cell", (), (), 3)}
    made = render("one", table, "demo", table.presets["demo"], cells, {"cell": Outcome(run)})
    assert made.problems == []
    return {number.column: number.value for number in made.lines[0].numbers if number.kind == "column"}


def test_a_statistic_of_no_record_is_computed_for_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(STATISTICS, "p10")
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "FedAvg.yaml")]
    main(["fit", *configs, "--trainer.max_epochs=1", "--run_dir=run"])
    later = Statistic("p10", P10.words, P10.reading, P10.of, always=False)
    monkeypatch.setitem(STATISTICS, "p10", later)
    record, run = read_record("run"), Path("run")
    assert "p10" not in record.summary["server"]["test"]["accuracy"]["last"]
    assert verify_record(run) == []
    values = client_values(read_table(run / "metrics.parquet"), record, "server", "test", "accuracy", "last")
    assert rendered(run, "accuracy", [{"statistic": "p10"}]) == {"P10": pytest.approx(100 * np.percentile(values, 10))}


def test_pooled_values_go_on_after_a_checkpoint_in_memory(tmp_path: Path) -> None:
    def metrics(trainer: Any) -> pd.DataFrame:
        return next(each for each in trainer.callbacks if isinstance(each, Recorder)).metrics()

    whole = metrics(fit(*build("FedAvg"), 2, settings=EACH_ROUND))
    fit(*build("FedAvg"), 1, save_to=tmp_path, settings=EACH_ROUND)
    checkpoint = tmp_path / "checkpoints/last.ckpt"
    assert [key for key, _ in json.loads(read_checkpoint(checkpoint)["callbacks"]["Recorder"]["pooled"])]
    resumed = metrics(fit(*build("FedAvg"), 2, ckpt_path=str(checkpoint), settings=EACH_ROUND))
    pd.testing.assert_frame_equal(resumed, whole)
    assert (whole["client"] == POOLED_CLIENT).sum() == 3  # rounds 0, 1, 2 at the server


def rows(point: str, metric: str, rounds: dict[int, dict[int, float]]) -> pd.DataFrame:
    """Return test rows: {round: {client: value}}."""
    found = [(number, client, point, "test", metric, v) for number, of in rounds.items() for client, v in of.items()]
    return pd.DataFrame(found, columns=["round", "client", "point", "split", "metric", "value"])


def test_where_it_is_not_defined_a_client_is_left_out_and_keeps_no_old_value() -> None:
    accuracy = rows("local", "accuracy", {1: {0: 0.5, 1: 0.5, 2: 0.5}, 2: {0: 0.6, 1: 0.6}})
    table = pd.concat([accuracy, rows("local", "kappa", {1: {0: 0.1, 1: 0.3, 2: 0.8}, 2: {0: 0.2}})])
    entry = summarize(table, [5, 5, 5])["local"]["test"]["kappa"]
    # Client 1 was scored in round 2, and kappa is not defined there; client 2's value of round 1 stands.
    assert entry["clients"] == 2
    assert entry["last"]["average"] == pytest.approx((0.2 + 0.8) / 2)
    assert entry["best_on_test"]["round"] == 2


def test_a_round_in_which_it_is_defined_for_nobody_has_none() -> None:
    accuracy = rows("server", "accuracy", {1: {0: 0.5, 1: 0.5}, 2: {0: 0.6, 1: 0.6}})
    table = pd.concat([accuracy, rows("server", "kappa", {1: {0: 0.1}})])
    entry = summarize(table, [5, 5])["server"]["test"]["kappa"]
    assert entry["clients"] == 0
    assert (entry["last"]["round"], entry["last"]["average"], entry["last"]["pooled"]) == (2, None, None)
    assert math.isclose(entry["best_on_test"]["average"], 0.1)


@pytest.mark.parametrize("change", [{"metric": "accuracy"}, {"client": -2}, {"round": -1}, {"split": "train"}])
def test_only_a_metric_that_is_pooled_from_counts_has_a_pooled_row(change: dict[str, Any]) -> None:
    accuracy = rows("server", "accuracy", {1: {0: 0.5, 1: 0.5}})
    pooled = rows("server", "kappa", {1: {POOLED_CLIENT: 0.5}})
    summarize(pd.concat([accuracy, pooled]), [5, 5])
    with pytest.raises(ValueError, match="counted from 0, got a negative one"):
        summarize(pd.concat([accuracy, pooled.assign(**change)]), [5, 5])


def test_what_is_no_statistic_is_refused_with_those_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for column, message in [
        (
            {"statistic": "p11"},
            "there is no statistic 'p11'; statistics are average, worst, .*, pooled, p10",
        ),
        ({"statistic": "pooled", "metric": "loss"}, "pooled, and .*kappa.* on all; loss on test is not"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            rendered(tmp_path, "accuracy", [column])
