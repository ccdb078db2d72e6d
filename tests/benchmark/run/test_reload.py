import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from federation import CONF
from torch.func import functional_call

from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Values
from benchmark.records.stored_run import read_metrics
from benchmark.run.cli import FederatedCLI
from benchmark.run.data_folder import moved
from benchmark.run.reload import become_client, client_values, configured_data, restore
from benchmark.run.resume import with_config_of_run
from benchmark.server import WrappedRule


def finished(run_dir: Path, conf: str, *overrides: str) -> Any:
    """A run of the tiny federation through the command line; returns it with its live method."""
    configs = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml")]
    return FederatedCLI(["fit", *configs, "--run_dir", str(run_dir), *overrides])


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished(tmp_path_factory.mktemp("restore") / "run", "PFedPT", "--trainer.max_epochs=2")


def test_a_restored_run_has_the_live_runs_logits_and_accuracies(live: Any) -> None:
    method, data = restore(live.run_dir)
    assert not method.training
    metrics = read_metrics(live.run_dir)
    last = metrics[(metrics["round"] == 2) & (metrics["metric"] == "accuracy")].set_index("client")["value"]
    different = set()
    for client in range(data.num_clients):
        become_client(method, client)
        rows = torch.from_numpy(data.held_out["test"][client])
        x = data.transform(data.pool.images[rows], None)
        with torch.no_grad():
            logits = method(method.prompted(x, {}))  # type: ignore[operator]
            own = {name: live.model.store.all_rows(name)[client] for name in live.model.roles.personal}
            prompted = functional_call(
                live.model.visual_prompt, {n.partition(".")[2]: v for n, v in own.items()}, (x, {})
            )
            assert torch.equal(logits, live.model(prompted))
        assert (logits.argmax(1) == data.pool.labels[rows]).double().mean().item() == pytest.approx(last[client])
        different.add(float(own["visual_prompt.up"].sum()))
    assert len(different) > 7  # clients that took part have prompts of their own
    for absent in (-1, data.num_clients):
        with pytest.raises(ConfigurationError, match=rf"there is no client {absent}: the run has 11, 0 to 10"):
            become_client(method, absent)


def test_what_cannot_be_restored_is_one_clear_line(live: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"run is no folder; give the directory"):
        restore(tmp_path / "run")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_bytes((live.run_dir / "config.yaml").read_bytes())
    with pytest.raises(ConfigurationError, match=r"bare has no checkpoints/last\.ckpt, which is needed here; run"):
        restore(bare)
    shutil.copytree(live.run_dir / "checkpoints", bare / "checkpoints")
    config = yaml.safe_load((bare / "config.yaml").read_text())
    config["seed_everything"] = 4
    (bare / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigurationError, match="it was made with seed 3, this run has 4"):
        restore(bare)


class Halved(WrappedRule):
    """Sends half of what the rule inside of it sends."""

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        sent = super().broadcast(round, shared, clients)
        common, own = ({name: value / 2 for name, value in part.items()} for part in (sent.common, sent.own))
        return replace(sent, common=common, own=own)


SERVERS = {
    "generated prompts": ("PFedPG", ()),
    "a rule around it": ("PFedPG", ("--server=test_reload.Halved",)),
    "other clients' prompts": ("PFedMoAP", ()),
    "a rule by its callback": (
        "FedVPT",
        (
            "--trainer.callbacks=benchmark.engine.rounds.Server",
            "--trainer.callbacks.rule=methods.servers.ClusteredServer",
            "--trainer.precision=64-true",
        ),
    ),
}


@pytest.fixture(scope="module")
def pfedpg(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished(tmp_path_factory.mktemp("pfedpg") / "run", "PFedPG", *SHORT)


SHORT = ("--trainer.max_epochs=2", "--trainer.num_sanity_val_steps=0", "--trainer.check_val_every_n_epoch=2")


@pytest.mark.parametrize("name", SERVERS)
def test_a_restored_client_has_what_the_servers_rule_sends_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(sys.modules, "test_reload", sys.modules[__name__])
    conf, options = SERVERS[name]
    if options or conf != "PFedPG":
        run = finished(tmp_path / "run", conf, *SHORT, *options)
    else:
        run = request.getfixturevalue("pfedpg")
    live, method = run.model, restore(run.run_dir)[0]
    assert method.server.rule.title == live.server.rule.title
    for point in ("server", "local"):
        seen = []
        for client in range(live.num_clients):
            if point == "local" and not live.store.all_rows("participated")[client]:
                with pytest.raises(ConfigurationError, match=f"client {client} has never trained"):
                    become_client(method, client, point)
                continue
            become_client(method, client, point)
            expected = client_values(live, client, point)
            found = {key: method.get_parameter(key).detach().clone() for key in expected}
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            seen.append(float(found[live.roles.shared[0]].sum()))
        assert (point == "server" and conf == "PFedMoAP") or len(set(seen)) > 1
        sent = live.simulation.received(live.server.rule, live.server.evaluated, (4,))
        again = method.simulation.received(method.server.rule, method.server.evaluated, (4,))
        torch.testing.assert_close((again.own, again.masks), (sent.own, sent.masks), rtol=0, atol=0)


def test_the_command_tests_a_finished_run_as_it_was_recorded(pfedpg: Any) -> None:
    again = FederatedCLI(with_config_of_run(["test", f"--run_dir={pfedpg.run_dir}"]))
    recorded = read_metrics(pfedpg.run_dir)
    places = ["round", "point", "split", "metric"]
    recorded = recorded[recorded["client"] >= 0].set_index(places).sort_index()
    for key, values in again.recorder.values.items():
        of = recorded.loc[key].set_index("client")["value"].reindex(range(11))
        torch.testing.assert_close(values.double(), torch.tensor(of.to_numpy()), rtol=0, atol=0, equal_nan=True)
    assert {(point, split) for _, point, split, _ in again.recorder.values} == {("server", "test"), ("local", "test")}


def test_data_sets_of_another_folder_are_taken_where_a_run_has_one() -> None:
    def config(source: str, root: str | None, checkpoint: str | None) -> dict[str, Any]:
        given = {} if root is None else {"root": root}
        backbone = {"class_path": "benchmark.backbones.vit.TimmViT", "init_args": {"checkpoint_path": checkpoint}}
        return {
            "data": {"source": {"class_path": f"datamodules.{source}", "init_args": given}},
            "model": {"class_path": "methods.FedVPT", "init_args": {"backbone": backbone}},
        }

    root, weights = "data.source.init_args.root", "model.init_args.backbone.init_args.checkpoint_path"
    assert moved(config("CIFAR10", "data", None), "/new") == {root: "/new"}
    assert moved(config("CIFAR10", "data", "data/a/b.pth"), "/new") == {root: "/new", weights: "/new/a/b.pth"}
    assert moved(config("CIFAR10", "data", "elsewhere/b.pth"), Path("/new")) == {root: "/new"}
    assert moved(config("CIFAR10", "data", None), None) == {}
    assert moved(config("DigitDomains", None, None), "/new") == {}  # its images come with the code
    assert moved(config("ImageFolders", "/home/me/pets", None), "/new") == {}  # its root is its own folder
    assert moved({"data": {"source": "datamodules.DigitDomains"}, "model": "methods.FedVPT"}, "/new") == {}


@pytest.mark.parametrize("kind", ["ImageFolders", "DomainFolders", "ImageIndex"])
def test_own_images_that_have_moved_are_found_by_their_name_or_where_they_are(kind: str, tmp_path: Path) -> None:
    def found(before: Path, data_dir: str) -> dict[str, str]:
        source = {"class_path": f"datamodules.own_images.{kind}", "init_args": {"name": "Pets", "root": str(before)}}
        return moved({"data": {"source": source}, "model": "methods.FedVPT"}, tmp_path / data_dir)

    for there in ("new/pets", "renamed", "kept/pets"):
        (tmp_path / there).mkdir(parents=True)
    root = "data.source.init_args.root"
    assert found(tmp_path / "gone/pets", "new") == {root: str(tmp_path / "new/pets")}
    assert found(tmp_path / "gone/pets", "renamed") == {root: str(tmp_path / "renamed")}
    assert found(tmp_path / "kept/pets", "renamed") == {}  # a folder of other data sets
    assert found(tmp_path / "kept/pets", "new") == {root: str(tmp_path / "new/pets")}
    assert found(tmp_path / "gone/pets", "nowhere") == {}


def test_the_data_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "data.yaml").write_text(
        "source: federation.TinyImages\npartition: {class_path: federation.Ragged, init_args: {num_clients: 4}}\n"
    )
    files = [tmp_path / "data.yaml"]
    assert configured_data(files, []).train_sizes == {0: 5, 1: 4, 2: 9, 3: 3}
    assert configured_data(files, ["partition.init_args.num_clients=2"]).num_clients == 2
    (tmp_path / "other.yaml").write_text("partition: datamodules.partition.DomainPerClient\n")
    assert configured_data([*files, tmp_path / "other.yaml"], []).manifest["algorithm"] == "DomainPerClient"
    with pytest.raises(ConfigurationError, match="no manifest or data configuration at"):
        configured_data([*files, tmp_path / "none.yaml"], [])
