"""A user's own metric goes through runs, records, tables, tuning's direction and callbacks; mistakes are one line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import CONF
from refusal import refused
from sklearn.metrics import jaccard_score, top_k_accuracy_score
from three_clients import HELD, LABELS, LOGITS, scored

from benchmark import commands
from benchmark.errors import ConfigurationError
from benchmark.files import write_json
from benchmark.metrics import METRICS, POOLED_CLIENT, know_metric, lower_is_better, metrics_of
from benchmark.own_metrics import check_own_metrics, chosen_metrics, declared
from benchmark.records.record_file import read_record
from benchmark.records.run_intervals import LIKE_THESE, lines_of
from benchmark.records.stored_run import read_metrics, stored_run, verify_record
from benchmark.run.cli import FederatedCLI, main
from benchmark.tables.layout import load_table

JACCARD = {"class_path": "torchmetrics.classification.MulticlassJaccardIndex", "name": "jaccard"}
TWO = {"class_path": "own_measures.among_two", "higher_is_better": True}
GIVEN: list[Any] = [TWO, "own_measures.MeanRank", JACCARD]
BASE = ["fit", *(f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml"))]


def test_own_metrics_of_clients_and_of_all_images_are_those_of_scikit_learn() -> None:
    metrics = chosen_metrics(GIVEN)
    assert [metric.name for metric in metrics[-3:]] == ["among_two", "mean_rank", "jaccard"]
    assert [metric.lower_is_better for metric in metrics[-3:]] == [False, True, False]
    one_by_one, at_once = scored((2, 0, 1), 1, metrics), scored(chosen=metrics)
    made, of_all = one_by_one.compute(), one_by_one.pooled()
    assert all(torch.equal(value, at_once.compute()[name]) for name, value in made.items() if name != "loss")
    guesses = torch.tensor(LOGITS).argmax(1).tolist()
    for client, (begin, end) in enumerate(HELD):
        y, logits = LABELS[begin:end], LOGITS[begin:end]
        assert made["among_two"][client].item() == pytest.approx(top_k_accuracy_score(y, logits, k=2, labels=range(3)))
        ranks = [1 + sum(other > row[label] for other in row) for row, label in zip(logits, y, strict=True)]
        assert made["mean_rank"][client].item() == pytest.approx(sum(ranks) / len(ranks))
    assert of_all["jaccard"] == pytest.approx(jaccard_score(LABELS, guesses, average="macro"))
    assert of_all["among_two"] == pytest.approx(top_k_accuracy_score(LABELS, LOGITS, k=2))


def test_arguments_and_inputs_are_given_as_declared() -> None:
    kappa = {"class_path": "torchmetrics.CohenKappa", "higher_is_better": True, "input": "predictions", "name": "kap"}
    first = {**TWO, "init_args": {"first": 1}, "name": "hits"}
    made = scored(chosen=chosen_metrics(["clinical", kappa, first])).compute()
    torch.testing.assert_close(made["kap"], made["kappa"], rtol=0, atol=1e-6)
    torch.testing.assert_close(made["hits"], made["accuracy"])
    assert set(made) == {metric.name for metric in metrics_of("clinical")} | {"kap", "hits"}


def test_numbers_of_other_kinds_are_taken_and_huge_ones_are_not_defined() -> None:
    given = [{"class_path": f"own_measures.{name}", "higher_is_better": True} for name in ("of_numpy", "odds", "count")]
    made = scored(chosen=chosen_metrics(given)).compute()
    torch.testing.assert_close(made["of_numpy"], made["accuracy"], rtol=0, atol=1e-6)
    assert made["odds"].isnan().tolist() == [len({*LABELS[begin:end]}) > 1 for begin, end in HELD]
    assert made["count"].isnan().all()
    energy = {"class_path": "own_measures.energy", "higher_is_better": True}
    check_own_metrics(chosen_metrics([*given, energy, {**TWO, "name": "a" * 100}]), 10)


def test_a_run_whose_metric_is_huge_has_a_record(tmp_path: Path) -> None:
    given = json.dumps({"class_path": "own_measures.odds", "higher_is_better": True})
    main([*BASE, "--trainer.max_epochs=1", f"--run_dir={tmp_path / 'run'}", f"--data.metrics={given}"])
    assert verify_record(tmp_path / "run") == []
    assert not (read_metrics(tmp_path / "run").query("metric == 'odds'")["value"] > 2).any()


def test_own_metrics_are_in_record_and_tables_also_where_they_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stopping = {"monitor": "test/server/mean_rank", "mode": "min", "patience": 1, "min_delta": 100.0}
    callback = json.dumps({"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": stopping})
    options = [f"--data.metrics={json.dumps(GIVEN)}", f"--trainer.callbacks=[{callback}]"]
    main([*BASE, "--trainer.max_epochs=4", "--run_dir=run", *options])
    for name in ("among_two", "mean_rank", "jaccard"):
        del METRICS[name]  # as in a process that reads the run alone
    record, table = read_record("run"), read_metrics("run")
    assert record.rounds_trained < 4
    assert verify_record("run") == []
    assert record.own_metrics is not None
    assert record.own_metrics["mean_rank"] == {"class_path": "own_measures.MeanRank", "lower_is_better": True}
    assert "own_measures" in (record.code or {})
    last = record.summary["server"]["test"]["mean_rank"]["last"]
    rows = table.query("metric == 'mean_rank' and point == 'server'").query("round == round.max()")
    values = rows.loc[rows["client"] != POOLED_CLIENT, "value"]
    assert last["worst"] == values.max() >= last["average"] == pytest.approx(values.mean())
    assert last["pooled"] == pytest.approx(values.mean())  # all clients have as many images
    monkeypatch.setenv("COLUMNS", "200")
    assert commands.main(["show", "run", "--metric", "mean_rank"]) == 0
    assert "test mean rank after aggregation" in capsys.readouterr().out
    assert [line.of for line in lines_of(stored_run("run"), "mean_rank", "server", "test")] == [LIKE_THESE]


@pytest.mark.parametrize("given", [JACCARD, JACCARD["class_path"], ["clinical", JACCARD]])
def test_one_metric_needs_no_list(given: Any) -> None:
    cli = FederatedCLI(
        [*BASE[1:], f"--data.metrics={given if isinstance(given, str) else json.dumps(given)}"], run=False
    )
    assert cli.datamodule.metrics == given
    assert chosen_metrics(cli.datamodule.metrics)[-1].name in ("jaccard", "multiclass_jaccard_index")


@pytest.mark.parametrize(("written", "read"), [("null", None), ("clinical", "clinical")])
def test_sets_are_read_as_before(written: str, read: str | None) -> None:
    assert FederatedCLI([*BASE[1:], f"--data.metrics={written}"], run=False).datamodule.metrics == read


def test_a_run_without_own_metrics_says_nothing_of_them(tmp_path: Path) -> None:
    main([*BASE, "--trainer.max_epochs=0", f"--run_dir={tmp_path / 'run'}"])
    assert "own_metrics" not in json.loads((tmp_path / "run/record.json").read_text())


def table_file(metric: str, given: Sequence[Any]) -> str:
    group = {"name": "tiny", "label": "Tiny", "overrides": [f"--data.metrics={json.dumps(given)}"]}
    content = {
        "title": "One run",
        "metric": metric,
        "presets": {"demo": {"seeds": [3], "data": [{**group, "configs": [str(CONF / "base.yaml")]}]}},
        "rows": [{"label": "A", "name": "a", "point": "server", "configs": [str(CONF / "HeadTune.yaml")]}],
    }
    write_json(Path("one.yaml"), content)  # JSON is YAML
    return "one.yaml"


def test_a_table_takes_them_by_name_with_their_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_table(table_file("mean_rank", ["own_measures.MeanRank"])).metric == "mean_rank"
    assert lower_is_better("mean_rank")  # as tuning reads it
    with pytest.raises(ConfigurationError, match="there is no metric jaccard; metrics are accuracy"):
        load_table(table_file("jaccard", ["own_measures.MeanRank"]))


def test_two_runs_with_one_name_for_two_directions_are_not_read_together() -> None:
    chosen_metrics(["own_measures.MeanRank"])
    chosen_metrics([{**JACCARD, "name": "mean_rank"}])  # another run in this process may
    with pytest.raises(ConfigurationError, match="two metrics are called 'mean_rank', and they are not the same"):
        know_metric("mean_rank", lower_is_better=True)
    with pytest.raises(ConfigurationError, match="two metrics are called 'accuracy'"):
        know_metric("accuracy", lower_is_better=False)


MISTAKES = {
    "no such module": (["nowhere.Metric"], "there is no metric 'nowhere.Metric'; expected the dotted path of a class"),
    "no such name": (["own_measures.Nobody"], "there is no metric 'own_measures.Nobody'"),
    "no such set": (["clinicl"], "there is no set of metrics 'clinicl'; give basic or clinical, or the dotted path"),
    "a set of another name": ("foo", "there is no set of metrics 'foo'; give basic or clinical, or the dotted path"),
    "neither": (3, "data.metrics"),
    "no metric": (["own_measures.NoMetric"], "own_measures.NoMetric is no metric: expected a class that derives from"),
    "no direction": (
        ["own_measures.among_two"],
        "does not say whether higher is better; give {class_path: ",
    ),
    "a value for each class": (
        [{"class_path": "own_measures.by_class", "higher_is_better": True}],
        "gives a tensor [8]; expected one number: in torchmetrics average=None gives one value per class",
    ),
    "an error": (
        [{"class_path": "own_measures.fails", "higher_is_better": True}],
        "of 3 images of classes [0] ends in RuntimeError: no second class; return NaN where it is not defined",
    ),
    "another order": (
        [{"class_path": "own_measures.of_the_first", "higher_is_better": True}],
        "must depend on nothing but the images",
    ),
    "arguments": (
        [{**JACCARD, "init_args": {"nothing": 1}}],
        "MulticlassJaccardIndex cannot be made with {'num",
    ),
    "a key": ([{"klass": "own_measures.MeanRank"}], "declares no metric: class_path (Field required"),
    "our name": (
        [{**TWO, "name": "accuracy"}],
        "two metrics are called 'accuracy'; give own_measures",
    ),
    "a name twice": ([TWO, TWO], "two metrics are called 'among_two'"),
    "a long name": (
        [{**TWO, "name": "a" * 101}],
        "has 101 signs, and at most 100 are recorded; give a shorter name: {class_path: own_measures.among_two",
    ),
    "a name": ([{**TWO, "name": "Top 2"}], "the name 'Top 2' must be of a-z, 0-9 and _ only"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_training(
    mistake: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given, words = MISTAKES[mistake]
    written = given if isinstance(given, str) else json.dumps(given)
    line = refused(capsys, main, [*BASE, f"--data.metrics={written}", f"--run_dir={tmp_path / 'run'}"])
    assert words in line
    assert not (tmp_path / "run").exists()


def test_benchmark_check_takes_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["check", "own_measures.MeanRank"]) == 0
    assert commands.main(["check", "own_measures.among_two"]) == 0
    assert capsys.readouterr().out.count("ok  ") == 4
    assert commands.main(["check", "own_measures.of_the_first"]) == 1
    assert "FAILED  It depends on the images alone" in capsys.readouterr().out


def test_names_follow_the_class() -> None:
    given = ["a.AUCMetric", "a.MulticlassF1Score", "clinical", "my.mean_rank"]
    assert [each.called for each in declared(given)] == ["auc_metric", "multiclass_f1_score", "mean_rank"]
