"""Images that a clinical run keeps: the same over ranks, batches and resumes, and metrics are made of them again."""

import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from federation import CONF, build, fit
from over_ranks import over_ranks
from three_clients import scored

from benchmark.engine.kept_images import KeptImages
from benchmark.engine.scores import ClientScores
from benchmark.errors import ConfigurationError
from benchmark.metrics import POOLED_CLIENT, metrics_of
from benchmark.ranks.strategy import RanksStrategy
from benchmark.records.keeping import keep_record
from benchmark.records.metrics_table import read_table
from benchmark.records.predictions import PREDICTIONS, by_class, confusion, images_of
from benchmark.records.record_file import MORE_FILES, read_record
from benchmark.records.stored_run import StoredRun, stored_run, verify_record
from benchmark.run.cli import main
from benchmark.run.fit import fit as run_from_python

NONE = math.nan
CLINICAL = ("--data.metrics=[clinical, own_measures.MeanRank]", "--data.evaluate_local=true")


def final_scores(count: int, *options: str) -> dict[str, tuple[KeptImages, dict[str, torch.Tensor], dict[str, float]]]:
    """Images, metrics and pooled metrics of the last evaluation, of a run over so many processes."""

    def work(strategy: RanksStrategy) -> Any:
        method, data = build(
            "FedPer", "--data.partition=federation.Few", "--data.clients_per_round=5", *CLINICAL, *options
        )
        fit(method, data, 1, settings={"devices": count, "strategy": strategy})
        scores = method.evaluation.scores
        return {point: (of.kept, of.compute(), of.pooled()) for (point, _), of in scores.items()}

    return work(RanksStrategy()) if count == 1 else over_ranks(count, work)[0]


def test_ranks_widths_and_batches_change_no_clinical_metric_and_no_kept_image() -> None:
    alone = final_scores(1, "--data.clients_at_once=2")  # five of six clients train
    assert {point: len(images.image.unique()) for point, (images, _, _) in alone.items()} == {"server": 18, "local": 16}
    for options in ("--data.clients_at_once=2",), ("--data.clients_at_once=2", "--data.eval_batch_size=2"):
        others = final_scores(2, *options)
        for point, (images, values, pooled) in alone.items():
            found, found_values, found_pooled = others[point]
            for name in ("client", "image", "label"):
                assert torch.equal(getattr(found, name), getattr(images, name)), name
            # Batches of other sizes give other last digits of logits.
            torch.testing.assert_close(found.logits, images.logits, rtol=0, atol=1e-6 * (len(options) - 1))
            torch.testing.assert_close(found_values, values, rtol=1e-5, atol=0, equal_nan=True)
            assert found_pooled == pytest.approx(pooled, nan_ok=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the basic metrics and one of the clinical ones."""
    folder = tmp_path_factory.mktemp("runs")
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    for run, options in {"basic": [], "clinical": ["--data.metrics=clinical"]}.items():
        more = ["--trainer.max_epochs=1", "--data.evaluate_local=true", f"--run_dir={folder / run}"]
        main(["fit", *configs, *more, *options])
    return folder


def test_a_clinical_run_has_them_in_its_files_and_a_basic_one_none(runs: Path) -> None:
    tables: dict[str, Any] = {run: read_table(runs / run / "metrics.parquet") for run in ("basic", "clinical")}
    more = set(tables["clinical"]["metric"]) - set(tables["basic"]["metric"])
    assert more == {metric.name for metric in metrics_of("clinical")} - {metric.name for metric in metrics_of("basic")}
    alike = tables["clinical"][~tables["clinical"]["metric"].isin(more)].reset_index(drop=True)
    assert alike.astype(str).equals(tables["basic"].astype(str))
    assert set(tables["clinical"].loc[tables["clinical"]["client"] == POOLED_CLIENT, "metric"]) == more
    assert verify_record(runs / "clinical") == []
    assert stored_run(runs / "clinical").untrained == stored_run(runs / "basic").untrained
    entry = read_record(runs / "clinical").summary["server"]["test"]["brier"]
    assert 0 < entry["last"]["average"] <= entry["last"]["worst"] <= 2
    assert {*read_record(runs / "clinical").files} - {*read_record(runs / "basic").files} == {*MORE_FILES}
    assert not any((runs / "basic" / name).exists() for name in MORE_FILES)


def test_metrics_are_made_anew_of_the_kept_images(runs: Path) -> None:
    run = stored_run(runs / "clinical")
    predictions, classes = run.predictions, run.classes
    last = run.metrics.query("round == 1 and split == 'test' and client >= 0").set_index(["point", "client", "metric"])
    assert predictions["point"].value_counts().to_dict() == {"server": 66, "local": 42}  # seven of eleven clients train
    assert not predictions.duplicated(["point", "image"]).any()
    assert (predictions["round"] == 1).all()
    for (point, client), rows in predictions.groupby(["point", "client"]):
        scores = ClientScores(1, 8, "clinical")
        images = images_of(rows)
        scores.update(images.logits.unsqueeze(0), images.y.unsqueeze(0), (0,))
        for name, value in scores.compute().items():
            stored = last["value"].get((point, client, name), NONE)
            assert value.item() == pytest.approx(stored, abs=1e-9 if name != "loss" else 1e-6, nan_ok=True), name
        own = classes[(classes["point"] == point) & (classes["client"] == client)]
        matrix = confusion(rows)
        assert own["support"].tolist() == matrix.sum(1).tolist()
        assert own["tp"].tolist() == matrix.diagonal().tolist()
        for name in ("sensitivity", "specificity", "ppv", "npv", "auroc", "ap"):
            stored = last["value"].get((point, client, name), NONE)
            assert own[name].mean() == pytest.approx(stored, nan_ok=True), name


def test_a_kept_copy_has_the_values_by_class_and_no_image(runs: Path, tmp_path: Path) -> None:
    kept = keep_record(runs / "clinical", tmp_path)
    assert verify_record(kept) == []
    assert not (kept / PREDICTIONS).exists()
    assert stored_run(kept).classes.equals(stored_run(runs / "clinical").classes)


def test_images_are_missed_in_one_line(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"basic has no predictions\.parquet: only .*--data\.metrics=clinical"):
        _ = stored_run(runs / "basic").predictions
    shutil.copytree(runs / "clinical", tmp_path / "changed")
    (tmp_path / "changed" / PREDICTIONS).write_bytes(b"PAR1")
    (problem,) = verify_record(tmp_path / "changed")
    assert "predictions.parquet was changed after the run" in problem


def test_images_that_do_not_give_the_accuracies_are_found(runs: Path) -> None:
    run = StoredRun(runs / "clinical")
    changed = run.predictions.copy()
    changed.loc[3, "label"] = 7 - changed.loc[3, "label"]
    vars(run)["predictions"] = changed  # as if both files had been written so
    (problem,) = run.problems
    assert problem.endswith("predictions.parquet does not give the record's accuracies")


def test_a_resumed_run_writes_the_same_images(tmp_path: Path) -> None:
    configs = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
    given = ["fit", *configs, "--data.metrics=clinical"]
    main([*given, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'whole'}"])
    main([*given, "--trainer.max_epochs=1", f"--run_dir={tmp_path / 'half'}"])
    half = f"--ckpt_path={tmp_path / 'half' / 'checkpoints' / 'last.ckpt'}"
    main([*given, "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'resumed'}", half])
    again = [*given, "--trainer.max_epochs=1", f"--run_dir={tmp_path / 'again'}", half]  # nothing is left to do
    main(again)
    for name in MORE_FILES:
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "half" / name).read_bytes()


def test_a_run_from_python_has_its_images_without_any_file() -> None:
    method, data = build("HeadTune", "--data.metrics=clinical")
    rows = run_from_python(method, data, rounds=1, accelerator="cpu", enable_progress_bar=False).predictions
    assert rows["image"].tolist() == [row for client in range(11) for row in data.held_out["test"][client]]
    assert rows["label"].tolist() == data.pool.labels[rows["image"].tolist()].tolist()


def test_a_run_from_python_without_images_says_so() -> None:
    run = run_from_python(*build("HeadTune"), rounds=1, accelerator="cpu", enable_progress_bar=False)
    with pytest.raises(ConfigurationError, match="the run keeps no scored images; give data metrics='clinical'"):
        _ = run.predictions


def test_values_by_class_are_as_computed_elsewhere() -> None:
    kept = scored().kept
    columns = {"client": kept.client, "label": kept.label, "prediction": kept.logits.argmax(1)}
    rows = pd.DataFrame({name: values.numpy() for name, values in columns.items()})
    rows = rows.assign(point="server", split="test", logits=list(kept.logits.numpy()))
    assert confusion(rows).tolist() == [[2, 1, 1, 0], [1, 2, 1, 0], [1, 0, 3, 0]]
    table = by_class(rows)
    for client, name, expected in [  # by hand, and from scikit-learn
        *[
            (0, "sensitivity", [0.5, 0.5, 1]),
            (1, "sensitivity", [0.5, 0.5, NONE]),
            (-1, "sensitivity", [0.5, 0.5, 0.75]),
        ],
        *[(0, "specificity", [2 / 3, 1, 0.75]), (2, "specificity", [2 / 3, 1, NONE])],
        *[
            (2, "ppv", [0, NONE, 1]),
            (-1, "ppv", [0.5, 2 / 3, 0.6]),
            (2, "npv", [1, 1, 0]),
            (-1, "npv", [0.75, 7 / 9, 6 / 7]),
        ],
        *[(0, "auroc", [5 / 6, 1, 1]), (1, "auroc", [1, 0.75, NONE]), (2, "auroc", [NONE] * 3)],
        *[
            (-1, "auroc", [0.875, 0.9375, 0.9375]),
            (1, "ap", [1, 5 / 6, NONE]),
            (-1, "ap", [0.816667, 0.8875, 0.916667]),
        ],
    ]:
        found = table.loc[table["client"] == client, name].tolist()
        assert found == pytest.approx(expected, abs=1e-6, nan_ok=True), (client, name)
