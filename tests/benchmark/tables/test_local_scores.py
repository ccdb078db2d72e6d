"""Every method is also scored as each client's last local training left it, where the data ask for it."""

import math
from pathlib import Path

import pandas as pd
import pytest
import torch
from federation import CONF, EACH_ROUND, build, fit, learned
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.records.hashes import config_hash
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import read_metrics, verify_record
from benchmark.run.cli import main
from benchmark.tables.readings import of_configuration

LOCAL = "--data.evaluate_local=true"


def run(conf: str, *options: str) -> dict[str, Tensor]:
    """Return the learned values after three rounds."""
    method, data = build(conf, *options)
    fit(method, data, 3, settings=EACH_ROUND)
    return learned(method)


def points(found: dict[str, Tensor]) -> set[str]:
    return {name.split("/")[1] for name in found if name.endswith("/test/accuracy")}


@pytest.mark.parametrize("conf", ["FedAvg", "PFedPT", "FedBABU"])
def test_nothing_else_changes(conf: str) -> None:
    plain, both = run(conf), run(conf, LOCAL)
    assert points(plain) == {"server"}
    assert points(both) == {"server", "local"}
    for name, value in plain.items():
        torch.testing.assert_close(both[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_method_that_scores_both_can_be_scored_after_the_aggregation_alone() -> None:
    both, plain = run("FedVPT"), run("FedVPT", "--data.evaluate_local=false")
    assert points(both) == {"server", "local"}
    assert points(plain) == {"server"}
    assert not any(name.startswith("store.last.") for name in plain)
    for name, value in plain.items():
        torch.testing.assert_close(both[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


def test_the_mean_of_one_client_is_that_clients_model() -> None:
    """With one client a round the aggregated model is its own, others have what their last round left, or no model."""
    found = run("FedAvg", LOCAL, "--data.clients_per_round=1")
    torch.testing.assert_close(found["metric.0/local/test/loss"], found["metric.0/server/test/loss"], rtol=0, atol=0)
    expected = torch.full_like(found["metric.0/server/test/loss"], math.nan)
    for number in (1, 2, 3):
        server, local = (found[f"metric.{number}/{point}/test/loss"] for point in ("server", "local"))
        trained = found[f"metric.{number}/local/train/loss"].isfinite()
        assert trained.sum() == 1
        expected[trained] = server[trained]
        torch.testing.assert_close(local, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert not torch.equal(local[~trained], server[~trained])


def test_averages_of_local_models_are_of_the_clients_that_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Record, log, last lines and the printed scores speak of the clients that have trained."""
    folder, files = tmp_path / "run", [f"--config={CONF / name}.yaml" for name in ("base", "FedVPT")]
    main(
        [
            "fit",
            *files,
            "--trainer.logger=true",
            "--data.clients_per_round=2",
            "--trainer.max_epochs=2",
            f"--run_dir={folder}",
        ]
    )
    metrics, record = read_metrics(folder), read_record(folder)
    trained = {number: set(metrics.query(f"split == 'train' and round <= {number}")["client"]) for number in (1, 2)}
    local = metrics.query("point == 'local' and split == 'test' and metric == 'accuracy'")
    assert {number: set(rows["client"]) for number, rows in local.groupby("round")} == {0: set(range(11)), **trained}
    last = local.query("round == 2")["value"]
    entry = record.summary["local"]["test"]["accuracy"]
    assert 2 <= entry["clients"] == len(trained[2]) <= 4
    assert entry["last"]["average"] == pytest.approx(last.mean())
    assert (entry["last"]["worst"], entry["last"]["std"]) == pytest.approx((last.min(), last.std()))
    assert record.summary["server"]["test"]["accuracy"]["clients"] == 11
    said = (
        f"after local training {100 * last.mean():.2f} % (worst client {100 * last.min():.2f} %; "
        f"of the {len(last)} clients that have"
    )
    assert said in capsys.readouterr().out
    logged = pd.read_csv(folder / "csv" / "metrics.csv").query("step == 2").iloc[0]
    assert logged["test/local/accuracy"] == pytest.approx(last.mean())
    assert logged["test/local/worst_accuracy"] == pytest.approx(last.min())
    main(["test", f"--run_dir={folder}"])
    (table,) = capsys.readouterr().out.split("after local training")[1].split("after aggregation")[:1]
    rows = [line for line in table.splitlines() if line.startswith("│")]
    assert sum("." not in row for row in rows) == 11 - len(trained[2])
    assert f"{100 * last.mean():.2f}" in rows[-1]
    assert verify_record(folder) == []


def test_a_table_may_read_what_its_runs_are_asked_for() -> None:
    arguments = ["fit", f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'FedAvg.yaml'}"]
    assert of_configuration(arguments[1:]).points == ("server",)
    assert of_configuration([*arguments[1:], LOCAL]).points == ("server", "local")
    with pytest.raises(ConfigurationError, match="FedAvg has no point 'local'; it has server"):
        of_configuration(arguments[1:]).check("local", "test", None, "a row")


def test_runs_with_other_scores_are_no_seeds_of_one_experiment(tmp_path: Path) -> None:
    assert config_hash({"data": {"evaluate_local": None}}) == config_hash({"data": {}})
    assert config_hash({"data": {"evaluate_local": True}}) != config_hash({"data": {}})
    method, data = build("FedAvg")
    fit(method, data, 1, save_to=tmp_path, evaluate=False)
    method, data = build("FedAvg", LOCAL)
    with pytest.raises(
        ConfigurationError, match=r"not one of FedAvg with this configuration: .* differ in store\.last"
    ):
        fit(method, data, 2, ckpt_path=str(tmp_path / "checkpoints/last.ckpt"), evaluate=False)
