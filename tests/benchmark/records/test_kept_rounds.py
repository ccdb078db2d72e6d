"""Evaluations whose images a run keeps: none, the last, the best on val or all, also if it is killed and resumed."""

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from federation import CONF, build

from benchmark.commands import main as command
from benchmark.errors import ConfigurationError
from benchmark.metrics import EVALUATED, HONEST_ACCURACY
from benchmark.records.hashes import config_hash
from benchmark.records.kept_rounds import PARTS, KeptRounds, rounds_to_keep
from benchmark.records.metrics_table import COLUMNS, read_table, round_file
from benchmark.records.predictions import (
    CLASSES,
    PREDICTIONS,
    by_class,
    classes_parquet_of,
    parquet_of,
    parse_predictions,
)
from benchmark.records.record_file import MORE_FILES, read_record
from benchmark.records.run_intervals import LIKE_THESE, THESE, lines_of, title_of
from benchmark.records.stored_run import StoredRun, stored_run, verify_record
from benchmark.run.cli import main
from benchmark.run.differences import differences
from benchmark.run.fit import fit

CONFIGS = [f"--config={CONF / name}" for name in ("base.yaml", "HeadTune.yaml")]
DATA = ("--data.partition=federation.Even", "--data.clients_per_round=4")
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False}
#: with this rate round 2 is the best of four
VAL = (*DATA, "--model.init_args.training.lr=1", "--data.val_fraction=0.3", "--data.evaluate_local=true")


def run(folder: Path, *options: str, rounds: int = 4) -> Path:
    main(["fit", *CONFIGS, *VAL, f"--trainer.max_epochs={rounds}", f"--run_dir={folder}", *options])
    return folder


def every_row(folder: Path) -> pd.DataFrame:
    return parse_predictions((folder / PREDICTIONS).read_bytes(), every=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each choice but the usual one, of the same numbers."""
    folder = tmp_path_factory.mktemp("runs")
    for keep in ("none", "best_on_val", "all"):
        run(folder / keep, "--data.metrics=clinical", f"--data.keep_predictions={keep}")
    run(folder / "last", "--data.metrics=clinical")
    run(folder / "basic", "--data.keep_predictions=last")
    return folder


def best_by_hand(folder: Path) -> int:
    """The first of the trained rounds whose clients are right most often on average."""
    table = read_table(folder / "metrics.parquet")
    chosen = table[(table["split"] == "val") & (table["point"] == "server") & (table["metric"] == EVALUATED)]
    means = {round: rows["value"].mean() for round, rows in chosen.groupby("round") if round}
    return min(means, key=lambda round: (-means[round], round))


def test_each_choice_keeps_its_rounds(runs: Path) -> None:
    every = every_row(runs / "all")
    assert every["round"].unique().tolist() == [0, 1, 2, 3, 4]
    order = ["point", "split", "round", "client", "image"]
    assert every[order].equals(every[order].sort_values(order, ignore_index=True))
    assert not (runs / "none" / PREDICTIONS).exists()
    assert {*read_record(runs / "none").files}.isdisjoint(MORE_FILES)
    assert best_by_hand(runs / "all") == 2
    for name, kept in {"last": 4, "basic": 4, "best_on_val": best_by_hand(runs / "all")}.items():
        rows = every_row(runs / name)
        assert rows["round"].unique().tolist() == [kept], name
        expected = every[every["round"] == kept].reset_index(drop=True)
        assert rows.drop(columns="logits").equals(expected.drop(columns="logits"))
        assert all((one == other).all() for one, other in zip(rows["logits"], expected["logits"], strict=True))
    for name in ("none", "last", "basic", "best_on_val", "all"):
        assert verify_record(runs / name) == [], name
        assert not (runs / name / PARTS).exists()


def test_metrics_are_the_same_whatever_is_kept(runs: Path) -> None:
    tables = [(runs / name / "metrics.parquet").read_bytes() for name in ("none", "last", "best_on_val", "all")]
    assert len(set(tables)) == 1
    assert "auroc" in set(read_table(runs / "none" / "metrics.parquet")["metric"])
    assert "auroc" not in set(read_table(runs / "basic" / "metrics.parquet")["metric"])


def test_readers_take_the_last_round_of_the_file(runs: Path) -> None:
    whole, last = (stored_run(runs / name) for name in ("all", "last"))
    assert (whole.predictions["round"] == 4).all()
    assert (runs / "all" / CLASSES).read_bytes() == (runs / "last" / CLASSES).read_bytes()
    assert lines_of(whole, "auroc", "server", "test") == lines_of(last, "auroc", "server", "test")


def test_intervals_of_the_best_round_are_of_that_round(runs: Path) -> None:
    best = stored_run(runs / "best_on_val")
    kept = best_by_hand(runs / "all")
    means = {line.of: line.value for line in lines_of(best, EVALUATED, "server", "test")}
    table = best.metrics.query(f"round == {kept} and split == 'test' and point == 'server' and metric == 'accuracy'")
    assert means[LIKE_THESE] == pytest.approx(table["value"].mean())
    assert means[THESE] == pytest.approx(table["value"].mean())
    assert classes_parquet_of(by_class(best.predictions)) == (runs / "best_on_val" / CLASSES).read_bytes()
    assert title_of(best, EVALUATED, "server", "test").endswith(f", round {kept}, best on val")
    assert "round" not in title_of(best, HONEST_ACCURACY, "server", "test")  # of the last one: no image gives it


@pytest.mark.parametrize("keep", ["best_on_val", "all"])
def test_a_killed_run_that_goes_on_writes_the_same_bytes(
    keep: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--data.metrics=clinical", f"--data.keep_predictions={keep}")
    take = KeptRounds.take

    def killed(self: KeptRounds, round: int, *more: Any) -> None:
        take(self, round, *more)
        if round == 3:  # its evaluation lies there, its checkpoint does not
            os.kill(os.getpid(), signal.SIGTERM)  # SIGINT is ignored where a shell runs tests in the background

    with monkeypatch.context() as patch:
        patch.setattr(KeptRounds, "take", killed)
        with pytest.raises(SystemExit):
            run(tmp_path / "run", *given)
    assert not (tmp_path / "run" / "record.json").exists()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    run(tmp_path / "run", *given, f"--ckpt_path={checkpoint}")
    moved = tmp_path / "other" / "checkpoints" / "last.ckpt"
    run(tmp_path / "moved", *given, f"--ckpt_path={moved}")
    for name in ("run", "moved"):
        for file in MORE_FILES:
            assert (tmp_path / name / file).read_bytes() == (runs / keep / file).read_bytes(), (name, file)
        assert verify_record(tmp_path / name) == []


@pytest.mark.parametrize("keep", ["best_on_val", "all"])
def test_a_finished_run_that_gets_more_rounds_has_those_before(keep: str, runs: Path, tmp_path: Path) -> None:
    given = ("--data.metrics=clinical", f"--data.keep_predictions={keep}")
    half = run(tmp_path / "half", *given, rounds=2) / "checkpoints" / "last.ckpt"
    run(tmp_path / "whole", *given, f"--ckpt_path={half}")
    run(tmp_path / "again", *given, f"--ckpt_path={half}", rounds=2)  # nothing is left to do
    for file in MORE_FILES:
        assert (tmp_path / "whole" / file).read_bytes() == (runs / keep / file).read_bytes()
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "half" / file).read_bytes()
    (tmp_path / "half" / PREDICTIONS).unlink()
    with pytest.raises(SystemExit):
        run(tmp_path / "lost", *given, f"--ckpt_path={half}")


def evaluation(round: int, *values: float) -> pd.DataFrame:
    rows = [(round, client, "server", "val", EVALUATED, value) for client, value in enumerate(values)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def images(round: int) -> pd.DataFrame:
    row = {"point": "server", "split": "val", "round": round, "client": 0, "image": 5, "group": 5, "label": 1}
    return pd.DataFrame([row | {"prediction": 0, "logits": [1.0, 0.5]}])


def test_the_best_round_is_the_first_of_equals_after_training_began(tmp_path: Path) -> None:
    """Means .9 before training, then .5, .6, .6 and .55."""
    tables = [evaluation(0, 0.8, 1.0), evaluation(1, 0.4, 0.6), evaluation(2, 0.5, 0.7)]
    tables += [evaluation(3, 0.6, 0.6), evaluation(4, 0.5, 0.6)]
    kept = KeptRounds(tmp_path, "best_on_val")
    for round, table in enumerate(tables):
        kept.take(round, table, images(round))
    assert sorted(path.name for path in (tmp_path / PARTS).iterdir()) == [f"round-00000{n}.parquet" for n in (0, 1, 2)]
    assert rounds_to_keep("best_on_val", pd.concat(tables), (1, 1)) == {2}
    assert rounds_to_keep("best_on_val", tables[0], (1, 1)) == {0}
    assert kept.finish(pd.concat(tables), (1, 1))
    assert every_row(tmp_path)["round"].tolist() == [2]
    resumed = KeptRounds(tmp_path, "best_on_val")
    resumed.take_up(tmp_path, iter(list(enumerate(tables))[:2]))
    assert sorted(path.name for path in (tmp_path / PARTS).iterdir()) == [
        "round-000000.parquet",
        "round-000001.parquet",
    ]
    resumed.take(2, tables[1].assign(round=2), images(2))  # as good as the round before
    assert not (tmp_path / PARTS / "round-000002.parquet").exists()
    (tmp_path / PARTS / "round-000001.parquet").unlink()
    (tmp_path / PREDICTIONS).unlink()
    with pytest.raises(
        ConfigurationError, match=r"does not have the images of round 1, which .*best_on_val keeps; put"
    ):
        resumed.take_up(tmp_path, iter(list(enumerate(tables))[:2]))


def test_a_round_may_lack_a_point_that_others_have(tmp_path: Path) -> None:
    """Whoever trains in the first round has no image of the split, so that nobody is scored as training left it."""
    kept = KeptRounds(tmp_path, "all")
    both = pd.concat([images(2).assign(point="local"), images(2)], ignore_index=True)
    for round, rows in enumerate((images(0), images(1), both)):
        kept.take(round, evaluation(round, 0.5), rows)
    tables = pd.concat([evaluation(round, 0.5) for round in range(3)])
    assert kept.finish(tables, (1,))
    found = every_row(tmp_path)[["point", "round"]].to_numpy().tolist()
    assert found == [["local", 2], ["server", 0], ["server", 1], ["server", 2]]


def test_the_last_images_are_those_of_the_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    tables = [evaluation(round, 0.5) for round in range(3)]
    source, other, moved = (tmp_path / name for name in ("source", "other", "moved"))
    for folder in (source, other, moved):
        folder.mkdir()
    KeptRounds(source, "last").take(2, tables[2], images(2))
    whole = KeptRounds(moved, "last")
    whole.take_up(source, iter([*enumerate(tables)]))
    assert (moved / PREDICTIONS).read_bytes() == (source / PREDICTIONS).read_bytes()
    assert whole.finish(pd.concat(tables), (1,))
    earlier = [*enumerate(tables)][:2]
    for folder in (other, source):  # as the same directory after a kill between evaluation and checkpoint
        early = KeptRounds(folder, "last")
        early.take_up(source, iter(earlier))
        said = r"source does not have the images of round 1, which data\.keep_predictions=last keeps; put back"
        with pytest.raises(ConfigurationError, match=said):
            early.finish(pd.concat(tables[:2]), (1,))
        early.take(2, tables[2], images(2))
        assert early.finish(pd.concat(tables), (1,))


def test_without_a_further_evaluation_images_of_another_round_are_refused(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "basic", tmp_path / "source")
    half = run(tmp_path / "half", "--data.keep_predictions=last", rounds=2) / "checkpoints" / "last.ckpt"
    shutil.copy(half, tmp_path / "source" / "checkpoints" / "last.ckpt")
    given = f"--ckpt_path={tmp_path / 'source' / 'checkpoints' / 'last.ckpt'}"
    with pytest.raises(SystemExit):
        run(tmp_path / "run", "--data.keep_predictions=last", given, rounds=2)
    assert not (tmp_path / "run" / "record.json").exists()
    assert verify_record(run(tmp_path / "more", "--data.keep_predictions=last", given, rounds=3)) == []


@pytest.mark.parametrize("keep", ["none", "last"])
def test_a_start_leaves_no_images_of_another_one(keep: Any, tmp_path: Path) -> None:
    """A run that kept more was killed here before its first checkpoint, so that the folder may be used again."""
    for before in ("last", "all"):
        KeptRounds(tmp_path, before).take(0, evaluation(0, 0.5), images(0))  # type: ignore[arg-type]
    kept = KeptRounds(tmp_path, keep)
    kept.take_up(tmp_path, iter([]))
    kept.take(0, evaluation(0, 0.5), images(0))
    assert [path.name for path in tmp_path.iterdir()] == {"none": [], "last": [PREDICTIONS]}[keep]


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("round", [7], "it is of round 7, expected 1"),
        ("round", ["x"], "its column round is of type string"),
        ("round", [[1]], "its column round is of type list"),
        ("round", pa.array([None], pa.int32()), "a row has no round"),
        ("client", ["x"], "its column client is of type string"),
        ("logits", ["x"], "its column logits is of type string"),
        ("logits", None, "it has the columns"),
    ],
)
def test_another_ones_file_of_a_round_is_refused_before_training(
    column: str, values: Any, said: str, tmp_path: Path
) -> None:
    path = round_file(tmp_path / PARTS, 1)
    path.parent.mkdir()
    path.write_bytes(parquet_of(images(1)))
    table, at = pq.read_table(path), list(images(1)).index(column)
    changed = table.drop_columns([column]) if values is None else table.set_column(at, column, pa.array(values))
    pq.write_table(changed, path)
    with pytest.raises(ConfigurationError, match=rf"round-000001\.parquet is not a readable table of pred.*: {said}"):
        KeptRounds(tmp_path, "all").take_up(tmp_path, iter([(1, evaluation(1, 0.5))]))


@pytest.mark.parametrize("label", [-1, 99])
def test_a_label_without_a_logit_is_refused(label: int) -> None:
    with pytest.raises(ValueError, match="it has a label that is none of the classes of its logits"):
        parse_predictions(parquet_of(images(1).assign(label=label)))


def test_classes_of_a_client_that_is_not_there_are_refused(runs: Path) -> None:
    stored = StoredRun(runs / "last")
    rows = stored.predictions.assign(client=99)
    strange = StoredRun(runs / "last")
    strange._contents[CLASSES] = classes_parquet_of(by_class(rows))
    with pytest.raises(ConfigurationError, match="client 99 has values, and the clients are -1 to"):
        _ = strange.classes


def test_without_images_a_line_says_what_to_set(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"data\.keep_predictions=none; run it .*--data\.keep_predictions=last"
    ):
        _ = StoredRun(runs / "none").predictions
    assert command(["show", str(runs / "none"), "--intervals", "auroc"]) == 0
    assert "--data.keep_predictions=last" in " ".join(capsys.readouterr().out.split())


def test_a_run_from_python_says_so_too() -> None:
    made = fit(*build("HeadTune", "--data.metrics=clinical", "--data.keep_predictions=none"), rounds=1, **QUIET)
    with pytest.raises(ConfigurationError, match="keeps no scored images; give data keep_predictions='last'"):
        _ = made.predictions
    kept = fit(*build("HeadTune", "--data.keep_predictions=last"), rounds=1, **QUIET)
    assert len(kept.predictions) == 66
    with pytest.raises(ConfigurationError, match=r"keep_predictions=all keeps a file of images, and the run has no"):
        fit(*build("HeadTune", "--data.keep_predictions=all"), rounds=1, **QUIET)


def test_the_best_round_asks_for_held_out_images() -> None:
    with pytest.raises(ConfigurationError, match=r"data\.val_fraction=0 holds none out; give for example"):
        build("HeadTune", "--data.keep_predictions=best_on_val")


def test_the_size_of_all_is_told_before_training_and_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO):
        run(tmp_path / "run", "--data.keep_predictions=all", rounds=1)
    (line,) = (record.message for record in caplog.records if "evaluations of" in record.message)
    held = 12 + len(set(every_row(tmp_path / "run").query("split == 'val'")["image"]))
    assert line.startswith(f"keeping 2 evaluations of {2 * held} images, 0.0 MB at most")
    monkeypatch.setattr("benchmark.run.predictions.MOST_BYTES", 1000)
    with pytest.raises(SystemExit):
        run(tmp_path / "large", "--data.keep_predictions=all", rounds=1)


def test_it_is_in_no_hash_and_must_stay_for_a_run_that_goes_on() -> None:
    one, other, old = ({"data": more} for more in ({"keep_predictions": "all"}, {"keep_predictions": None}, {}))
    assert config_hash(one) == config_hash(other) == config_hash(old)
    assert differences(old, other) == []
    assert differences(other, one) == [("data.keep_predictions", None, "all")]


def test_a_file_of_other_rounds_does_not_verify(runs: Path) -> None:
    for keep, wrong in {"all": 2, "best_on_val": 0}.items():
        stored = StoredRun(runs / keep)
        rows = every_row(runs / keep)
        vars(stored)["predictions"] = rows[rows["round"] == rows["round"].max()].assign(round=wrong)
        (problem,) = stored.problems
        assert problem.endswith("predictions.parquet does not give the record's accuracies")
