import dataclasses
import hashlib
import importlib
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from finished_run import write_finished_run
from recorded_results import record_of

from benchmark import files
from benchmark.config.yaml_files import read_mapping
from benchmark.errors import ConfigurationError
from benchmark.files import write_json, write_text
from benchmark.metrics import METRICS
from benchmark.records import environment as environment_module
from benchmark.records import source_code
from benchmark.records.environment import environment
from benchmark.records.hashes import canonical, config_hash
from benchmark.records.keeping import keep_record
from benchmark.records.metrics_table import COLUMNS, read_table, write_parquet
from benchmark.records.record import POINTS
from benchmark.records.record_file import is_finished, read_record, write_record
from benchmark.records.stored_run import read_metrics, stored_runs, verify_record
from benchmark.records.summary import average_by_round, client_values, summarize
from benchmark.run.differences import differences


def table(values: dict[int, list[float | None]], point: str = "server", metric: str = "accuracy", split: str = "test"):
    """A metrics table from {round: one value per client, None where there is no row}."""
    rows = [
        (number, client, point, split, metric, value)
        for number, row in values.items()
        for client, value in enumerate(row)
        if value is not None
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    config = "seed_everything: 3\ntrainer: {max_epochs: 2}\nrun_dir: here\n"
    write_finished_run(folder, record_of(), table({0: [0.1, 0.2], 1: [0.5, 0.7], 2: [0.4, 0.9]}), config)
    return folder


# --- summaries ---


def test_summary_of_two_clients_by_hand() -> None:
    entry = summarize(table({0: [0.1, 0.3], 1: [0.5, 0.9], 2: [0.4, 0.8]}), [30, 10])["server"]["test"]["accuracy"]
    assert entry["clients"] == 2
    assert entry["last"]["round"] == 2
    assert entry["last"]["average"] == pytest.approx(0.6)
    assert entry["last"]["worst"] == entry["last"]["worst_decile"] == pytest.approx(0.4)
    assert entry["last"]["std"] == pytest.approx(0.4 / math.sqrt(2))
    assert entry["last"]["pooled"] == pytest.approx((30 * 0.4 + 10 * 0.8) / 40)
    assert entry["last10"]["rounds"] == 2  # round 0 is before any training
    assert entry["last10"]["average"] == pytest.approx((0.7 + 0.6) / 2)
    assert entry["last10"]["worst"] == pytest.approx(0.45)
    assert entry["best_on_test"]["round"] == 1
    assert entry["best_on_test"]["average"] == pytest.approx(0.7)
    assert entry["round0"]["average"] == pytest.approx(0.2)


def test_worst_client_is_taken_per_round_and_then_averaged() -> None:
    entry = summarize(table({1: [0.0, 1.0], 2: [1.0, 0.0]}), [1, 1])["server"]["test"]["accuracy"]
    assert entry["last10"]["worst"] == 0.0  # each client's own mean would be 0.5


def test_last10_takes_ten_evaluated_rounds_however_far_apart() -> None:
    values = {number: [number / 1000] for number in range(0, 75, 5)}  # 0, 5, ..., 70
    entry = summarize(table(values), [4])["server"]["test"]["accuracy"]
    assert entry["last10"]["rounds"] == 10
    assert entry["last10"]["average"] == pytest.approx(np.mean(range(25, 75, 5)) / 1000)
    assert entry["last"]["std"] is None


@pytest.mark.parametrize(("clients", "expected"), [(9, 0.0), (20, 0.5), (29, 0.5), (30, 1.0)])
def test_worst_decile_is_a_tenth_rounded_down_and_at_least_one(clients: int, expected: float) -> None:
    values = table({1: [float(client) for client in range(clients)]}, metric="balanced_accuracy")
    entry = summarize(values, [1] * clients)["server"]["test"]["balanced_accuracy"]
    assert entry["last"]["worst_decile"] == expected


def test_pooled_best_is_its_own_round() -> None:
    # Averages 0.5 and 0.45: round 1 is best. Pooled over 1 and 9 images: 0.18 and 0.81: round 2 is.
    entry = summarize(table({1: [0.9, 0.1], 2: [0.0, 0.9]}), [1, 9])["server"]["test"]["accuracy"]
    assert (entry["best_on_test"]["round"], entry["best_on_test"]["pooled_round"]) == (1, 2)
    assert entry["best_on_test"]["pooled"] == pytest.approx(0.81)


def test_of_a_loss_the_largest_is_worst_and_the_smallest_best() -> None:
    entry = summarize(table({1: [3.0, 1.0], 2: [1.0, 2.0]}, metric="loss"), [1, 1])["server"]["test"]["loss"]
    assert entry["best_on_test"]["round"] == 2
    assert (entry["last"]["worst"], entry["last10"]["worst"]) == (2.0, 2.5)
    assert "pooled" not in entry["last"]


def test_a_diverged_loss_is_none_and_never_best() -> None:
    entry = summarize(table({1: [3.0, 1.0], 2: [1.0, math.nan]}, metric="loss"), [1, 1])["server"]["test"]["loss"]
    assert [entry["last"][name] for name in ("average", "worst", "worst_decile")] == [None] * 3
    assert entry["best_on_test"]["round"] == 1


def test_validation_has_no_best_round_and_is_never_pooled() -> None:
    entry = summarize(table({1: [0.5, 0.5]}, split="val"), [1, 1])["server"]["val"]["accuracy"]
    assert "best_on_test" not in entry
    assert "pooled" not in entry["last"]


def test_locally_a_clients_value_stands_until_it_trains_again() -> None:
    local = table({1: [0.2, None, None], 2: [None, 0.6, None], 3: [0.4, None, None]}, point="local")
    entry = summarize(local, [1, 1, 1])["local"]["test"]["accuracy"]
    assert entry["clients"] == 2  # the third never trained
    assert entry["last"]["average"] == pytest.approx((0.4 + 0.6) / 2)
    assert entry["last10"]["average"] == pytest.approx((0.2 + 0.4 + 0.5) / 3)
    high = table({1: [0.9, None], 2: [0.1, 0.2]}, point="local")
    assert summarize(high, [1, 1])["local"]["test"]["accuracy"]["best_on_test"]["round"] == 2


def test_locally_round_0_is_of_all_clients_and_later_ones_of_those_that_trained() -> None:
    local = table({0: [0.1, 0.3, 0.2], 1: [0.5, None, None], 2: [0.7, None, 0.9]}, point="local")
    entry = summarize(local, [1, 3, 1])["local"]["test"]["accuracy"]
    assert entry["round0"]["average"] == pytest.approx(0.2)
    assert entry["clients"] == 2
    assert entry["last"]["average"] == entry["last"]["pooled"] == pytest.approx(0.8)
    assert (entry["last"]["worst"], entry["last10"]["average"]) == pytest.approx((0.7, 0.65))
    rounds, found = average_by_round(local, [1, 3, 1], "local", "test", "accuracy")
    assert dict(zip(rounds, found["average"], strict=True)) == pytest.approx({0: 0.2, 1: 0.5, 2: 0.8})


def test_a_nan_accuracy_means_not_evaluated() -> None:
    metrics = pd.concat(
        [
            table({1: [0.5, math.nan], 2: [math.nan, 0.7]}, point="local"),
            table({1: [1.0, math.nan], 2: [math.nan, 3.0]}, point="local", metric="loss"),
        ]
    )
    local = summarize(metrics, [1, 1])["local"]["test"]
    assert local["accuracy"]["last"]["average"] == pytest.approx(0.6)
    assert local["loss"]["last"]["average"] == 2.0


def test_at_the_server_all_clients_are_needed() -> None:
    with pytest.raises(ValueError, match="every client's test images"):
        summarize(table({1: [0.5, 0.5], 2: [0.5, None]}), [1, 1])
    with pytest.raises(ValueError, match="every client's test images"):
        summarize(table({1: [0.5, None]}), [1, 1])
    summarize(table({1: [0.5, None]}), [1, 0])  # a client without test images has no accuracy
    with pytest.raises(ValueError, match="client 1 has values, but there are 1 test sizes"):
        summarize(table({1: [0.5, 0.5]}), [1])


@pytest.mark.parametrize("which", ["last", "last10", "best_on_test"])
def test_values_per_client_agree_with_the_summary(tmp_path: Path, which: str) -> None:
    metrics = table({number: [0.1 * number % 0.7, 0.3 + 0.05 * (number % 4)] for number in range(14)})
    write_text(tmp_path / "config.yaml", "a: 1\n")
    write_json(tmp_path / "manifest.json", {})
    record = write_record(tmp_path, record_of(), metrics)
    values = client_values(metrics, record, "server", "test", "accuracy", which)
    assert np.mean(values) == pytest.approx(record.summary["server"]["test"]["accuracy"][which]["average"])
    with pytest.raises(ConfigurationError, match="no macro_f1 on test at the point 'server'"):
        client_values(metrics, record, "server", "test", "macro_f1", which)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"point": "middle"}, "point is one of server, local, got middle"),
        ({"metric": "speed"}, "got speed"),
        ({"round": -1}, "counted from 0"),
        ({"round": 1, "client": 1}, "there twice: round 1, client 1, point server"),
    ],
)
def test_malformed_tables_are_refused(change: dict[str, object], message: str) -> None:
    metrics = table({1: [0.5, 0.5]}).astype({"value": float})
    metrics.loc[0, list(change)] = list(change.values())
    with pytest.raises(ValueError, match=message):
        summarize(metrics, [1, 1])
    with pytest.raises(ValueError, match="has the columns"):
        summarize(metrics.drop(columns="value"), [1, 1])


# --- files ---


def test_the_same_table_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    metrics = pd.concat([table({1: [0.5, 0.25], 2: [1.0, 0.0]}), table({1: [2.0, 3.0]}, metric="loss")])
    write_parquet(tmp_path / "a", metrics)
    shuffled = metrics.sample(frac=1.0, random_state=1)[list(reversed(COLUMNS))]
    write_parquet(tmp_path / "b", shuffled.astype({"point": "category", "round": "int64"}))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    kinds = pd.read_parquet(tmp_path / "a").dtypes.astype(str)
    assert list(kinds) == ["int32", "int32", "category", "category", "category", "float64"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt", "old")

    def no_replace(source: object, target: object) -> None:
        raise OSError("disk is gone")

    monkeypatch.setattr(files.os, "replace", no_replace)
    with pytest.raises(ConfigurationError, match=r"a\.txt cannot be written: disk is gone$"):
        write_text(tmp_path / "a.txt", "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("a.txt", "old")]


def test_writers_of_one_file_do_not_remove_each_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def while_another_begins(source: Path, target: Path) -> None:
        files.remove_unlocked(tmp_path, re.compile(r"\.a\.txt\.\d+\.tmp"))
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", while_another_begins)
    write_text(tmp_path / "a.txt", "new")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("a.txt", "new")]


def test_record_survives_the_round_trip(run_dir: Path) -> None:
    record = read_record(run_dir)
    assert record.client_names == ("domain 0", "domain 1")
    assert record.summary["server"]["test"]["accuracy"]["last"]["average"] == pytest.approx(0.65)
    assert record.files["manifest.json"]["bytes"] == (run_dir / "manifest.json").stat().st_size
    assert record.config_hash == config_hash({"seed_everything": 3, "trainer": {"max_epochs": 2}})
    assert len(read_metrics(run_dir)) == 6
    assert verify_record(run_dir) == []


def test_without_a_record_a_run_is_not_finished(tmp_path: Path, run_dir: Path) -> None:
    assert is_finished(run_dir)
    (run_dir / "record.json").unlink()
    assert not is_finished(run_dir)
    with pytest.raises(ConfigurationError, match=r"no record\.json"):
        read_record(run_dir)


def test_the_record_is_written_last(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.yaml is missing"):
        write_record(tmp_path, record_of(), table({1: [0.5, 0.5]}))
    write_text(tmp_path / "config.yaml", "a: 1\n")
    write_json(tmp_path / "manifest.json", {})
    with pytest.raises(ValueError, match="some are missing"):
        write_record(tmp_path, record_of(), table({1: [0.5, None]}))
    assert not is_finished(tmp_path)


def test_a_record_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    write_text(tmp_path / "config.yaml", "a: 1\n")
    write_json(tmp_path / "manifest.json", {})
    metrics = table({1: [0.5, 0.5]})
    for wrong, said in {
        "own_metrics": {"a" * 101: {"class_path": "a.b", "lower_is_better": True}},
        "facts": {"drift": {"1": math.nan}},
        "peak_memory_bytes": -1,
    }.items():
        with pytest.raises(ConfigurationError, match=r"no record is written, as it could not be read again \(.*resume"):
            write_record(tmp_path, dataclasses.replace(record_of(), **{wrong: said}), metrics)
        assert not is_finished(tmp_path)
    assert write_record(tmp_path, record_of(), metrics) == read_record(tmp_path)


@pytest.mark.parametrize("count", [127, 200, 40_000])
def test_a_method_may_report_many_numbers(count: int, tmp_path: Path) -> None:
    reported = pd.concat([table({1: [0.5, 0.5]}), table({1: [0.0]}, "local", "m0", "train")])
    names = pd.DataFrame({"round": 1, "client": 0, "point": "local", "split": "train", "metric": range(1, count)})
    names = names.assign(metric="m" + names["metric"].astype(str), value=names["metric"].astype(float))
    write_parquet(tmp_path / "metrics.parquet", pd.concat([reported, names]))
    kind = pq.read_schema(tmp_path / "metrics.parquet").field("metric").type.index_type
    assert (kind == pa.int8()) == (count < 128)  # with accuracy 128 names: the bytes of other files stay
    found = read_table(tmp_path / "metrics.parquet").query("split == 'train'")
    assert {**found.set_index("metric")["value"]} == {f"m{number}": float(number) for number in range(count)}


def test_a_number_beyond_what_a_record_holds_is_none_in_its_summary(tmp_path: Path) -> None:
    metrics = pd.concat([table({1: [0.5, 0.5]}), table({1: [1e41, 1.0]}, "local", "drift", "train")])
    write_finished_run(tmp_path / "run", record_of(), metrics)
    assert read_record(tmp_path / "run").summary["local"]["train"]["drift"]["last"]["average"] is None
    assert verify_record(tmp_path / "run") == []


def test_a_half_written_record_is_refused(run_dir: Path) -> None:
    path = run_dir / "record.json"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigurationError, match="not a readable record"):
        read_record(run_dir)
    assert len(verify_record(run_dir)) == 1


def test_a_changed_number_is_noticed(run_dir: Path) -> None:
    path = run_dir / "record.json"
    payload = json.loads(path.read_text())
    payload["summary"]["server"]["test"]["accuracy"]["last"]["average"] = 0.99
    path.write_text(json.dumps(payload))
    with pytest.raises(ConfigurationError, match="changed after it was written"):
        read_record(run_dir)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema 99, expected 1"),
        ({"seed": "3"}, "of the wrong type: seed"),
        ({"extra": 1}, "unknown or of the wrong type: extra"),
        ({"seconds": {"total": 1}}, "of the wrong type: seconds"),
        ({"files": {"../../etc/passwd": {"sha256": "0", "bytes": 1}}}, "of the wrong type: files"),
    ],
)
def test_records_of_another_form_are_refused(run_dir: Path, change: dict[str, object], message: str) -> None:
    path = run_dir / "record.json"
    payload = json.loads(path.read_text()) | change
    del payload["record_sha256"]
    payload["record_sha256"] = hashlib.sha256(canonical(payload)).hexdigest()
    path.write_text(json.dumps(payload))
    with pytest.raises(ConfigurationError, match=message):
        read_record(run_dir)


@pytest.mark.parametrize("name", ["config.yaml", "manifest.json", "metrics.parquet"])
def test_verify_notices_changed_and_missing_files(run_dir: Path, name: str) -> None:
    content = (run_dir / name).read_bytes()
    (run_dir / name).write_bytes(content + b" ")
    assert [f"{name} was changed" in problem for problem in verify_record(run_dir)] == [True]
    (run_dir / name).unlink()
    assert [f"{name} is missing" in problem for problem in verify_record(run_dir)] == [True]


def test_keep_copies_the_small_files_only(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / "last.ckpt").write_text("big")
    target = keep_record(run_dir, tmp_path / "kept")
    assert sorted(entry.name for entry in target.iterdir()) == [
        "config.yaml",
        "manifest.json",
        "metrics.parquet",
        "record.json",
    ]
    assert verify_record(target) == []
    assert keep_record(run_dir, tmp_path / "kept") == target
    write_finished_run(run_dir, record_of(seed=4), table({1: [0.5, 0.5]}))
    with pytest.raises(ConfigurationError, match="holds another record"):
        keep_record(run_dir, tmp_path / "kept")


def test_keep_leaves_a_large_manifest_behind(run_dir: Path, tmp_path: Path) -> None:
    clients = [{"name": "domain 0", "train_classes": [3, 0], "test_classes": [9, 1], "train": list(range(40_000))}]
    metrics = table({1: [0.5]})
    write_finished_run(run_dir, record_of(1), metrics, algorithm="IID", class_names=["x", "y"], clients=clients)
    target = keep_record(run_dir, tmp_path / "kept")
    assert not (target / "manifest.json").exists()
    kept = json.loads((target / "partition.json").read_text())
    assert kept["clients"] == [{"name": "domain 0", "train_classes": [3, 0], "test_classes": [9, 1]}]
    assert kept["manifest_sha256"] == read_record(target).files["manifest.json"]["sha256"]
    assert verify_record(target) == []


def test_keep_refuses_unfinished_and_changed_runs(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "config.yaml").write_text("seed_everything: 4\n")
    with pytest.raises(ConfigurationError, match=r"is not kept: .*config\.yaml was changed"):
        keep_record(run_dir, tmp_path / "kept")
    with pytest.raises(ConfigurationError, match=r"is not kept: .*no record\.json"):
        keep_record(tmp_path, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


# --- hashes and environment ---


def test_config_hash_ignores_what_cannot_change_a_result() -> None:
    config = {"model": {"lr": 0.1}, "data": {"clients_at_once": 1, "num_workers": 0}, "trainer": {"max_epochs": 5}}
    same = {
        "trainer": {"max_epochs": 5, "logger": [{"class_path": "WandbLogger"}], "default_root_dir": "there"},
        "run_dir": "elsewhere",
        "data": {"num_workers": 4, "clients_at_once": "auto", "cohort_width": 3},
        "model": {"lr": 0.1},
    }
    assert config_hash(config) == config_hash(same)
    one, four = ({**config, "trainer": {"max_epochs": 5, "devices": n, "num_nodes": n}} for n in (1, 4))
    assert config_hash(one) == config_hash(four)
    assert config_hash({"model": {"devices": 1}}) != config_hash({"model": {"devices": 4}})
    assert config_hash(config) != config_hash({**config, "trainer": {"max_epochs": 6}})
    assert config_hash(config) != config_hash({**config, "model": {"lr": 0.2}})
    openai, none, other = ({"clip": {"pretrained_tag": tag}} for tag in ("openai", None, "laion2b_s34b_b79k"))
    assert config_hash(openai) == config_hash(none) != config_hash(other)
    auto, folder, never = ({"data": {"cache_features": given}} for given in ("auto", "data/features", False))
    assert config_hash(auto) == config_hash(folder) != config_hash(never)
    later, older = ({"model": {"lr": 0.1, **given}} for given in ({"head_mu": None, "train_backbone": True}, {}))
    assert config_hash(later) == config_hash(older) != config_hash({"model": {"lr": 0.1, "head_mu": 0.1}})
    assert len(config_hash({})) == 64


@pytest.mark.parametrize("name", ["config", "cache", "subgroups", "logger", "run_dir", "num_workers"])
def test_config_hash_sees_an_argument_that_has_the_name_of_a_free_one(name: str) -> None:
    one, other = ({"model": {"init_args": {name: given}}} for given in ("a", "b"))
    assert config_hash(one) != config_hash(other)
    assert differences(one, other) == [(f"model.init_args.{name}", "a", "b")]


def test_config_hash_leaves_out_where_images_lie() -> None:
    one, other = (
        {"data": {"source": {"init_args": {"sources": [{"init_args": {"root": there, "cache": there}}]}}}}
        for there in ("a", "b")
    )
    assert config_hash(one) == config_hash(other)
    for part, name in (("source", "config"), ("partition", "cache"), ("transform", "root")):
        one, other = ({"data": {part: {"init_args": {name: given}}}} for given in ("a", "b"))
        assert config_hash(one) != config_hash(other)


def test_environment_names_versions_and_hardware() -> None:
    found = environment()
    assert found["versions"]["numpy"] == np.__version__
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["threads"] == torch.get_num_threads()
    assert found["hardware"]["cpu"]
    assert set(found["git"]) == {"revision", "dirty"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    json.dumps(found, allow_nan=False)


def test_environment_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment()["git"] == {"revision": None, "dirty": None}


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_environment_says_whether_the_code_has_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benchmark").mkdir()
    (tmp_path / "results").mkdir()
    code = tmp_path / "benchmark" / "results.py"
    code.write_text("1\n")
    git(tmp_path, "init", "-q")
    monkeypatch.setattr(environment_module, "__file__", str(code))
    assert environment()["git"]["revision"] is None  # not tracked there
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    (tmp_path / "results" / "table.md").write_text("a table\n")
    found = environment()["git"]
    assert (len(found["revision"]), found["dirty"]) == (40, False)
    (tmp_path / "benchmark" / "new.py").write_text("2\n")
    assert environment()["git"]["dirty"] is True


def test_what_a_forking_process_has_loaded_is_the_code_of_its_forks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "loaded_part.py"
    source.write_text("class Part:\n    rate = 0.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(source_code, "LOADED", {})
    part = importlib.import_module("loaded_part").Part()
    before = source_code.code_of([part])
    assert before["loaded_part"] == hashlib.sha256(source.read_bytes()).hexdigest()
    source_code.remember_loaded()
    assert "numpy" not in source_code.LOADED
    source.write_text("class Part:\n    rate = 1000\n")
    assert source_code.code_of([part]) == before
    assert source_code.changed_files(before) == ["loaded_part.py"]


def test_records_are_read_quickly_and_without_pandas(run_dir: Path) -> None:
    metrics = pd.concat(
        [
            table({1: [0.5] * 100, 2: [0.6] * 100}, point, metric, split)
            for point in POINTS
            for metric in ("accuracy", "balanced_accuracy", "macro_f1", "loss")
            for split in ("test", "val", "base", "novel", "base_excl_local", "all", "new", "train")
        ]
    )
    write_record(run_dir, record_of(100), metrics)
    began = time.process_time()
    for _ in range(200):
        read_record(run_dir)
    assert (time.process_time() - began) / 200 < 0.005  # of this process alone, about 0.6 ms on an idle core
    code = "import sys, benchmark.records.record_file as r; r.read_record(sys.argv[1]); print('pandas' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(run_dir)], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "False"


def test_ten_thousand_records_are_read_in_five_seconds(run_dir: Path, tmp_path: Path) -> None:
    metrics = pd.concat([table({1: [0.5] * 50, 2: [0.6] * 50}, p, m) for p in POINTS for m in METRICS])
    write_record(run_dir, record_of(50), metrics)
    for number in range(1000):
        (tmp_path / "many" / f"run{number}").mkdir(parents=True)
        (tmp_path / "many" / f"run{number}" / "record.json").hardlink_to(run_dir / "record.json")
    (tmp_path / "many" / "unfinished").mkdir()
    (tmp_path / "many" / "broken").mkdir()
    (tmp_path / "many" / "broken" / "record.json").write_text("{")
    taken = []
    for _ in range(3):  # the best of them: a neighbour on the same core takes its time from this one
        began = time.process_time()
        found, problems = stored_runs(tmp_path / "many")
        taken.append(time.process_time() - began)
    assert min(taken) * 10 < 5.0  # about 2.6 s on one core
    assert len(found) == 1000
    assert ["not a readable record" in problem for problem in problems] == [True]


def test_a_split_of_a_partition_of_ones_own_is_recorded(run_dir: Path) -> None:
    metrics = pd.concat([table({1: [0.5, 0.5]}), table({1: [0.2, 0.4]}, split="hard")])
    write_record(run_dir, record_of(), metrics)
    assert read_record(run_dir).summary["server"]["hard"]["accuracy"]["last"]["average"] == pytest.approx(0.3)
    assert set(read_metrics(run_dir)["split"]) == {"test", "hard"}


def test_averages_by_round(run_dir: Path) -> None:
    metrics = read_metrics(run_dir)
    rounds, found = average_by_round(metrics, (10, 10), "server", "test", "accuracy")
    assert rounds.tolist() == [0, 1, 2]
    assert found["average"] == pytest.approx([0.15, 0.6, 0.65])
    assert found["worst"] == pytest.approx([0.1, 0.5, 0.4])
    assert average_by_round(metrics, (10, 10), "local", "test", "accuracy")[1] == {}


def test_what_is_kept_says_nothing_of_the_folder_of_the_images(tmp_path: Path) -> None:
    config = "seed_everything: 3\ndata:\n  source:\n    init_args:\n      root: /home/somebody/images\n      size: 4\n"
    metrics = table({0: [0.5, 0.25], 1: [0.75, 0.5]})
    record = write_finished_run(tmp_path / "run", record_of(), metrics, config)
    kept = keep_record(tmp_path / "run", tmp_path / "kept")
    assert not verify_record(kept)
    assert (kept / "config.yaml").read_text() == config.replace("/home/somebody/images", "data")
    assert "somebody" not in (kept / "record.json").read_text()
    assert dataclasses.replace(read_record(kept), files=record.files) == record
    assert keep_record(tmp_path / "run", tmp_path / "kept") == kept, "kept again it is the same"


def test_nor_of_the_folder_of_weights_that_lie_beside_them(tmp_path: Path) -> None:
    config = (
        "seed_everything: 3\nmodel:\n  checkpoint_path: {0}/weights/vit.safetensors\n  other: {0}\n"
        "data:\n  source:\n    init_args:\n      root: {0}\n"
    )
    metrics = table({0: [0.5, 0.25], 1: [0.75, 0.5]})
    for name, folder in (("here", "data"), ("there", "/home/somebody/images"), ("apart", "/home/somebody/im")):
        text = config.format(folder) if name != "apart" else config.format(folder).replace("im/w", "images/w")
        write_finished_run(tmp_path / "runs" / name, record_of(), metrics, text)
        kept = keep_record(tmp_path / "runs" / name, tmp_path / "kept")
        assert not verify_record(kept)
    here, there, apart = (read_mapping(tmp_path / "kept" / name / "config.yaml") for name in ("here", "there", "apart"))
    assert there["model"]["checkpoint_path"] == here["model"]["checkpoint_path"] == "data/weights/vit.safetensors"
    assert apart["model"]["checkpoint_path"] == "/home/somebody/images/weights/vit.safetensors"
    assert there["data"] == here["data"]


def test_nor_of_a_folder_whose_name_goes_on_in_the_next_line(tmp_path: Path) -> None:
    folder = f"/home/{'some body/' * 12}Office Caltech"
    text = yaml.safe_dump(
        {"data": {"root": folder, "size": 4}, "model": {"checkpoint_path": f"{folder}/our weights/a: b.pt", "n": 1}}
    )
    assert "\n    " in text
    write_finished_run(tmp_path / "run", record_of(), table({0: [0.5, 0.25]}), "seed_everything: 3\n" + text)
    kept = keep_record(tmp_path / "run", tmp_path / "kept")
    assert not verify_record(kept)
    assert read_mapping(kept / "config.yaml") == {
        "seed_everything": 3,
        "data": {"root": "data", "size": 4},
        "model": {"checkpoint_path": "data/our weights/a: b.pt", "n": 1},
    }


def test_an_argument_that_is_called_root_is_kept_as_it_is(tmp_path: Path) -> None:
    source = {"init_args": {"sources": [{"init_args": {"root": "/home/somebody/images"}}]}}
    config = {"data": {"source": source, "transform": {"root": 2}}, "model": {"init_args": {"root": "mean"}}}
    text = "seed_everything: 3\n" + yaml.safe_dump(config)
    write_finished_run(tmp_path / "run", record_of(), table({0: [0.5, 0.25]}), text)
    kept = keep_record(tmp_path / "run", tmp_path / "kept")
    assert not verify_record(kept)
    assert (kept / "config.yaml").read_text() == text.replace("/home/somebody/images", "data")


def test_a_run_that_goes_on_with_other_code_says_so(recwarn: pytest.WarningsRecorder) -> None:
    assert source_code.combined({}, {"methods.a": "1"}) == {"methods.a": "1"}
    assert source_code.combined({"methods.a": "1"}, {"methods.a": "1"}) == {"methods.a": "1"}
    assert not recwarn.list
    both = source_code.combined({"methods.a": "1", "methods.b": "2"}, {"methods.a": "3", "methods.b": "2"})
    assert both == {"methods.a": "1, then 3", "methods.b": "2"}
    assert [str(warning.message).endswith(": methods.a") for warning in recwarn.list] == [True]
