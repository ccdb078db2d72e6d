"""Every method is also scored as each client's last local training left it, where the data ask for it."""

from pathlib import Path

import pytest
import torch
from federation import CONF, build, fit, learned
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.records.hashes import config_hash
from benchmark.tables.readings import of_configuration

LOCAL = "--data.evaluate_local=true"


def run(conf: str, *options: str) -> dict[str, Tensor]:
    """What three rounds leave behind."""
    method, data = build(conf, *options)
    fit(method, data, 3)
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
    """With one client a round the aggregated model is its own, and all others have what their last round left."""
    found = run("FedAvg", LOCAL, "--data.clients_per_round=1")
    expected = found["metric.0/server/test/loss"].clone()
    torch.testing.assert_close(found["metric.0/local/test/loss"], expected, rtol=0, atol=0)
    for number in (1, 2, 3):
        server, local = (found[f"metric.{number}/{point}/test/loss"] for point in ("server", "local"))
        trained = found[f"metric.{number}/local/train/loss"].isfinite()
        assert trained.sum() == 1
        expected[trained] = server[trained]
        torch.testing.assert_close(local, expected, rtol=1e-6, atol=1e-6)
        assert not torch.equal(local[~trained], server[~trained])


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
