"""A deployment on Flower: its server and clients, over Flower's messages, bit for bit the simulation's numbers."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from federation import CONF, EACH_ROUND, TinyImages, build, clients_and_server, fit
from PIL import Image

from benchmark.errors import ConfigurationError

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Context, Message, RecordDict
from safetensors.torch import load, load_file, save

from benchmark.commands import main
from benchmark.deploy import client
from benchmark.deploy.agreement import Agreement
from benchmark.deploy.app import write_app
from benchmark.deploy.flower import min_clients_of, seconds_of
from benchmark.deploy.in_process import FIRST, InProcess
from benchmark.deploy.message_sizes import TITLE, sizes_of
from benchmark.deploy.messages import RECORD, content, fields_of
from benchmark.deploy.outcome import RunFolder, read_split
from benchmark.deploy.server import LiveServer, run
from benchmark.engine.roles import read_roles
from benchmark.predict.trained_run import TrainedRun
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import read_metrics, verify_record

ROUNDS = 2
#: Kept features are made of all images together in a simulation, and may round by where an image stands among them.
FEW = ("--data.partition=federation.Few",)  # six clients instead of eleven
OPTIONS = ("--data.clients_per_round=4", "--data.clients_at_once=1", "--data.cache_features=false")


def agreement(conf: str, *options: str) -> Agreement:
    """Return the agreement that the command would put into an app."""
    files = [f"--config={CONF / name}.yaml" for name in ("base", conf)]
    return Agreement.of([*files, *options, f"--trainer.max_epochs={ROUNDS}"])


class Wire(InProcess):
    """Keeps the tensors of all messages, and changes what clients answer.

    Args:
        agreement: of the deployment.
        folder: in which clients keep what is their own.
    """

    def __init__(self, agreement: Agreement, folder: Path) -> None:
        super().__init__(agreement, folder)
        self.tensors: list[bytes] = []
        #: changes what a client answers
        self.spoil: Callable[[int, Message], Message] = lambda client, answer: answer

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Have the clients answer, the last one first."""
        sent = [*messages]
        self._keep(sent)
        for answer in super().send_and_receive(sent, timeout=timeout):
            self._keep([answer])
            yield self.spoil(answer.metadata.src_node_id - FIRST, answer)

    def _keep(self, messages: Iterable[Message]) -> None:
        found = [fields_of(message).get("tensors") for message in messages if RECORD in message.content]
        self.tensors += [bytes(tensors) for tensors in found if tensors is not None]


_runs = iter(range(1, 1000))


@pytest.fixture
def deployed(tmp_path: Path) -> Callable[[Agreement], tuple[LiveServer, Wire]]:
    """A server and its clients, started."""

    def start(agreed: Agreement) -> tuple[LiveServer, Wire]:
        wire = Wire(Agreement.read(agreed.text()), tmp_path / "sites")
        return LiveServer(Agreement.read(agreed.text()), wire, 60.0, f"run{next(_runs)}"), wire

    return start


SLOW = [
    pytest.param(conf, marks=pytest.mark.slow)
    for conf in (
        *("PFedBayesPT", "FedPGP", "FedBABU", "FedOTP", "TPFL", "FLoRA", "PF2LoRAPruned", "FedMGP"),
        *("FederatedRidge", "NearestClassMean", "PEPFedPT", "PLAN", "HiLoRA"),
    )
]
#: They read the features of all their images, which a simulation makes of all clients' images together.
ROUNDED = ("FederatedRidge", "NearestClassMean", "PEPFedPT")
#: Of methods that make their messages themselves or report to the server: what they send beside parameters.
OWN_NAMES = {
    "SGPT": {"group_selections", "group_frequency"},
    "FedMGP": {"context_slots", "image_prompts_slots"},
    "PLAN": {"all_context", "all_image_prompts"},
}


def assert_same(value: torch.Tensor, expected: torch.Tensor, conf: str, what: Any) -> None:
    """Compare what was deployed with its simulation, to the bit."""
    if conf in ROUNDED:
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(value, expected), what


@pytest.mark.parametrize("conf", ["FedVPT", "PFedPG", "FedAvg", "SGPT", *SLOW])
def test_a_deployment_is_its_simulation_bit_for_bit(conf: str, deployed: Any, tmp_path: Path) -> None:
    agreed = agreement(conf, *OPTIONS, *FEW)
    server, wire = deployed(agreed)
    run(server, RunFolder(tmp_path / "server"), len(wire.nodes), 0.0, lambda seconds: None)
    assert not server.refused

    torch.manual_seed(0)
    simulated, data = build(conf, *OPTIONS, *FEW)
    recorder = fit(simulated, data, ROUNDS, settings=EACH_ROUND).callbacks[0]
    expected = clients_and_server(simulated)
    written = load_file(tmp_path / "server" / "shared.safetensors")
    assert written.keys() == {*simulated.roles.shared}
    for name, value in written.items():
        assert_same(value, expected[name], conf, name)
    trained = 0
    for number in agreed.terms.training_clients:
        kept = tmp_path / "sites" / server.name / f"client{number}.safetensors"
        for name, value in load_file(kept).items() if kept.exists() else ():
            assert_same(value, expected[f"store.{name}"][number], conf, (name, number))
            trained += 1
    assert trained or not simulated.store.names
    recorded = recorder.values
    found = {row[:1] + row[2:5] for row in server.metrics}
    assert found == recorded.keys()
    for round, number, point, split, metric, value in server.metrics:
        of_simulation = recorded[round, point, split, metric][number].item()
        # A loss may round by how many clients are scored together; which class is the likeliest does not.
        loosely = 1e-4 if conf in ROUNDED else 1e-6
        assert value == pytest.approx(of_simulation, rel=loosely if metric == "loss" else 0, abs=0, nan_ok=True)
    # Nothing but what the roles say has left a client or the server.
    sent = {name.removeprefix("common/").removeprefix("own/") for each in wire.tensors for name in load(each)}
    assert sent <= {*simulated.roles.shared, *simulated.roles.uploaded, *OWN_NAMES.get(conf, ())}


@pytest.mark.parametrize("method", ["fedvpt", pytest.param("pfedprompt", marks=pytest.mark.slow)])
def test_the_counts_of_the_table_of_messages_are_those_of_its_parameters(method: str) -> None:
    row = sizes_of(method)
    files = [f"--config=configs/{name}.yaml" for name in (f"methods/{method}", f"suites/{row.suite}")]
    model, _, _ = Agreement.of([*files, "--trainer.max_epochs=1"]).constructed()
    numbers = sum(model.get_parameter(name).numel() for name in read_roles(model).shared)
    assert (row.numbers_down, row.numbers_up) == (numbers, numbers)
    assert (row.counted_down, row.counted_up) == (4 * numbers, 4 * numbers)
    for sent in (row.bytes_down, row.bytes_up):
        assert 4 * numbers < sent < 4 * numbers + 1000  # names, shapes and Flower's own beside the numbers


def test_the_table_of_messages_says_who_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(agreed: Agreement, method: Any, rule: Any) -> None:
        if type(method).__name__ == "SGPT":
            raise ConfigurationError("SGPT cannot be deployed: it is tried out here")

    monkeypatch.setattr(Agreement, "check", check)
    assert main(["deploy", "messages", "fedvpt", "fedbayes", "--out", str(tmp_path)]) == 2
    assert "there is no method 'fedbayes'; expected some of atpfl, coop" in capsys.readouterr().err
    assert main(["deploy", "messages", "fedvpt", "sgpt", "--out", str(tmp_path)]) == 0
    lines = (tmp_path / "messages.md").read_text().splitlines()
    assert lines[0] == f"# {TITLE}"
    assert "cannot be deployed" in lines[-1]
    rows = json.loads((tmp_path / "messages.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["fedvpt", "sgpt"]
    assert rows[0]["numbers_up"] > 0 == rows[1]["numbers_up"]


def test_a_broken_upload_is_refused_by_name_and_the_round_goes_on(deployed: Any) -> None:
    agreed = agreement("FedVPT", "--data.clients_at_once=1", "--data.clients_per_round=11")
    server, wire = deployed(agreed)
    name = min(server.shared)
    right = server.shared[name]
    bad = {
        0: (save({name: right[:1]}), rf"'{name}' has shape"),
        1: (save({name: torch.full_like(right, float("nan"))}), "is not finite"),
        2: (save({name: right, "head": right.clone()}), "was not asked for"),
        3: (b"\x80\x04\x95pickle", "no safetensors"),
        4: (bytes(right.numel() * 4 + 2**20 + 1), "bytes; expected at most"),
        5: (save({}), "is missing"),
        6: (save({name: right.double()}), "is torch.float64, expected torch.float32"),
    }

    def spoil(client: int, answer: Message) -> Message:
        fields = fields_of(answer)
        if client in bad and "tensors" in fields:
            answer.content = content(tensors=bad[client][0])
        return answer

    wire.spoil = spoil
    server.meet()
    before = right.clone()
    server.round(1)
    assert len(server.refused) == len(bad)
    for number, (_, said) in bad.items():
        told = [line for line in server.refused if f" {agreed.client_names[number]}:" in line]
        assert len(told) == 1
        assert said.replace("'", "") in told[0].replace("'", "")
    assert server.shared[name].isfinite().all()
    assert not torch.equal(server.shared[name], before)


#: What a client may send.
SCORES = {f"server/test/{name}": 0.5 for name in ("accuracy", "balanced_accuracy", "macro_f1", "loss")}
STRANGE_SCORES: dict[int, dict[str, Any]] = {
    0: {"server/test/" + "a" * 400: 1.0},
    1: {"a" * 400 + "/test/accuracy": 1.0},
    2: {"server/test/../../etc": 1.0},
    3: {"server/test/accuracy": "much"},
    4: {f"server/test/m{number}": 1.0 for number in range(1001)},
    5: SCORES | {"server/test/acuracy": 0.5},
    6: SCORES | {"server/test/accuracy": math.nan},
    7: SCORES | {"server/test/accuracy": 7.0},
    8: SCORES | {"server/test/loss": -1.0},
    9: {"server/test/accuracy": 0.5},
    10: SCORES | {"local/train/loss": 0.1},
}
#: Of a training, what a client says and the server leaves out.
STRANGE_REPORTS: dict[int, dict[str, Any]] = {
    0: {"local/train/loss": 1e300, "local/train/own": 1.0},
    1: {"local/train/KL": 1.0, "local/train/own": 1.0},
    2: {"local/train/own": 1},
    3: {f"local/train/m{number}": 1.0 for number in range(1001)},
}


def test_strange_scores_are_refused_and_the_others_count(deployed: Any, tmp_path: Path) -> None:
    agreed = agreement("FedVPT", *OPTIONS)
    server, wire = deployed(agreed)

    def spoil(client: int, answer: Message) -> Message:
        if client in STRANGE_SCORES and "client" not in fields_of(answer):
            answer.content = content(**STRANGE_SCORES[client])
        return answer

    wire.spoil = spoil
    server.meet()
    server.evaluate(0)
    assert [line.rpartition(": ")[2] for line in server.refused] == [
        *["they are no metrics"] * 5,
        "server/test/acuracy is not asked for",
        "server/test/accuracy is nan",
        "server/test/accuracy is 7",
        "server/test/loss is -1",
        "server/test/balanced_accuracy is missing",
        "local/train/loss is not asked for",
    ]
    assert server.metrics == []
    with pytest.raises(ConfigurationError, match=r"no client has scored itself, so that .* has no record"):
        RunFolder(tmp_path).write(server)
    wire.spoil = lambda client, answer: answer
    server.round(1)
    server.held_out, known = {client: {} for client in server.held_out}, server.held_out
    server.evaluate(1)
    assert {row[3] for row in server.metrics} == {"train"}
    with pytest.raises(ConfigurationError, match="no client has scored itself"):
        RunFolder(tmp_path).write(server)
    server.held_out = known
    server.evaluate(2)
    server.finished = 2
    RunFolder(tmp_path).write(server)
    assert verify_record(tmp_path) == []


def test_scores_that_no_record_can_hold_are_refused(deployed: Any, tmp_path: Path) -> None:
    server, wire = deployed(agreement("FedVPT", *OPTIONS, "--data.clients_per_round=11"))

    def spoil(client: int, answer: Message) -> Message:
        fields = dict(fields_of(answer))
        if "tensors" in fields:
            answer.content = content(**fields | STRANGE_REPORTS.get(client, {}))
        elif client == 4 and "client" not in fields:
            answer.content = content(**SCORES | {"server/test/loss": 1e300})
        return answer

    wire.spoil = spoil
    server.meet()
    server.round(1)
    said = (
        "local/train/loss is 1e+300",
        "local/train/KL is no metric's name: point/split/metric of small letters, digits and underscores",
        "local/train/own is no number",
        "1002 numbers; expected at most 1000",
    )
    expected = [f"what {server._who(client)} says of its training: {what}" for client, what in enumerate(said)]
    assert server.refused == expected
    server.evaluate(1)
    assert server.refused[4].endswith(f"the scores of {server._who(4)}: server/test/loss is 1e+300")
    assert {row[1] for row in server.metrics if row[3] == "test"} == {*range(11)} - {4}
    told = {client: {row[4] for row in server.metrics if row[1] == client and row[3] == "train"} for client in range(4)}
    assert told == {0: {"own"}, 1: {"loss", "own"}, 2: {"loss"}, 3: set()}
    server.finished = 2
    RunFolder(tmp_path).write(server)
    assert verify_record(tmp_path) == []


def test_a_site_without_test_images_is_left_out_of_the_scores(deployed: Any) -> None:
    server, wire = deployed(agreement("FedVPT", *OPTIONS))
    nothing = dict.fromkeys(SCORES, math.nan)

    def spoil(client: int, answer: Message) -> Message:
        fields = dict(fields_of(answer))
        if "client" in fields and client in (0, 1):
            answer.content = content(**fields | {"held_out/test": 0})
        elif client == 0:
            answer.content = content(**nothing)
        return answer

    wire.spoil = spoil
    server.meet()
    server.evaluate(0)
    assert len(server.refused) == 1
    assert f"the scores of {server._who(1)}: server/test/" in server.refused[0]
    assert server.refused[0].endswith(" is not asked for")
    assert {row[1] for row in server.metrics} == {*range(2, 11)}


@pytest.mark.parametrize("conf", ["PFedPG", "PromptAMP"])
def test_a_round_in_which_nobody_is_there_is_void(conf: str, deployed: Any) -> None:
    server, wire = deployed(agreement(conf, *OPTIONS, *FEW, "--data.clients_per_round=2"))
    chosen = server.rule.select(1)
    wire.nodes = [node for node in wire.nodes if node - FIRST not in chosen]
    server.meet()
    server.round(1)
    assert server.facts["void"] == {1: 1.0}
    assert not server.refused


def test_the_hub_has_no_say_in_where_a_site_keeps_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    agreed = agreement("FedVPT", *OPTIONS)
    app = {"agreement": agreed.text(), "state": str(tmp_path / "hub")}

    def folder_of(**settings: str) -> Path:
        node = {"client": agreed.client_names[0], **settings}
        return client.site_of(Context(1, 1, node, RecordDict(), app), {"run": f"run{next(_runs)}"}).folder.parent

    assert folder_of() == tmp_path / "home" / "federated_runs"
    assert folder_of(state=str(tmp_path / "own")) == tmp_path / "own"


def test_a_site_is_scored_in_steps_of_the_batch_not_of_one_image(deployed: Any, tmp_path: Path) -> None:
    sites = "{class_path: datamodules.Sites, init_args: {sites: [north, south], classes: [c0, c1], most: 12, size: 32}}"
    by_site = ("--data.partition=datamodules.DomainPerClient", "--data.clients_per_round=2")
    agreed = agreement("PFedBayesPT", f"--data.source={sites}", *by_site)
    for split, count in (("train", 8), ("test", 40)):
        for number in range(count):
            image = tmp_path / "own" / split / f"c{number % 2}" / f"{number}.png"
            image.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (number, number, split == "test")).save(image)
    server, wire = deployed(agreed)
    wire.nodes, wire.node_config = [FIRST], {"data": str(tmp_path / "own"), "client": "north"}
    server.meet()
    server.round(1)
    (site,) = (site for (folder, _), site in client._HERE.items() if folder.name == server.name)
    steps: list[int] = []
    site.client.method.evaluation.on_step.append(lambda: steps.append(1))
    server.evaluate(1)
    assert not server.refused
    points = {row[2] for row in server.metrics if row[3] == "test"}
    assert len(steps) == len(points) * 40 / agreed.terms.eval_batch_size


def test_a_site_that_is_away_at_an_evaluation_is_left_out_of_it(deployed: Any, tmp_path: Path) -> None:
    agreed = agreement("FedVPT", *OPTIONS)
    server, wire = deployed(agreed)
    for number in (0, 1, 2):
        if number:
            server.round(number)
        wire.nodes = [FIRST + client for client in range(11) if client != 4 or number != 1]
        server.meet()
        server.evaluate(number)
    assert server.refused == []
    RunFolder(tmp_path).write(server)
    assert verify_record(tmp_path) == []
    found = read_metrics(tmp_path).query("point == 'server' and split == 'test' and metric == 'accuracy'")
    assert found.groupby("round").size().to_dict() == {0: 11, 1: 10, 2: 11}
    entry = read_record(tmp_path).summary["server"]["test"]["accuracy"]
    assert (entry["clients"], entry["best_on_test"]["round"]) == (11, 2)


def test_a_site_that_missed_the_end_gets_its_model_from_a_server_again(deployed: Any, tmp_path: Path) -> None:
    agreed = agreement("PFedPG", *OPTIONS, *FEW)
    server, wire = deployed(agreed)
    folder, everybody = RunFolder(tmp_path / "server"), wire.nodes
    wire.nodes = [node for node in everybody if node != FIRST + 4]
    run(server, folder, 1, 0.0, lambda seconds: None)
    own = tmp_path / "sites" / server.name / "client4"
    assert not own.exists()
    wire.nodes = everybody
    again = LiveServer(Agreement.read(agreed.text()), wire, 60.0, server.name)
    run(again, folder, 1, 0.0, lambda seconds: None)
    assert not again.refused
    assert len(TrainedRun(own, device="cpu").predict(TinyImages().load().images[:2])) == 2
    assert verify_record(tmp_path / "server") == []
    added = {str(row) for row in again.metrics} - {str(row) for row in server.metrics}
    assert len(again.metrics) == len(server.metrics) + len(added)
    assert {row[:2] for row in again.metrics if str(row) in added} == {(ROUNDS, 4)}


def test_what_a_rule_reports_is_taken_as_a_simulation_takes_it(deployed: Any) -> None:
    server, wire = deployed(agreement("FedVPT", *OPTIONS, *FEW))
    each = torch.arange(6.0)
    server.rule.report = lambda round: {"whole": 3, "tensor": torch.tensor(0.5), "each": each + round.number}
    server.meet()
    server.round(1)
    assert {name: of for name, of in server.facts.items() if name != "void"} == {"whole": {1: 3.0}, "tensor": {1: 0.5}}
    again = LiveServer(server.agreement, wire, 60.0, server.name)
    again.go_on(server.state())
    again.meet()
    again.evaluate(1)
    found = [row for row in again.metrics if row[4] == "each"]
    assert found == [(1, client, "server", "train", "each", client + 1.0) for client in range(6)]
    wire.nodes = []
    server.meet()
    server.round(2)
    assert server.facts["void"] == {2: 1.0}
    assert server.facts["whole"] == {1: 3.0, 2: 3.0}
    server.rule.report = lambda round: {"whole": math.inf}
    with pytest.raises(ConfigurationError, match=r"report gives 'whole' = inf; expected a finite number \(round 2\)"):
        server.round(2)


def test_a_site_refuses_what_no_server_of_this_app_sends(deployed: Any) -> None:
    server, wire = deployed(agreement("FedVPT", *OPTIONS))
    whole = {f"common/{name}": value.long() for name, value in server.shared.items()}
    right = {f"common/{name}": value for name, value in server.shared.items()}
    for kind, fields, said in (
        ("train", {"round": 1, "tensors": save(whole)}, "as torch.int64; expected torch.float32"),
        ("evaluate", {"round": 1, "tensors": save(whole)}, "as torch.int64; expected torch.float32"),
        ("train", {"round": 0, "tensors": save(right)}, "has round 0 trained; the first one is 1"),
        ("train", {"round": 1, "clients": ["a"], "tensors": save(right)}, "the server asks for round 1"),
    ):
        (answer,) = wire.send_and_receive([Message(content(run=server.name, **fields), FIRST, kind)])
        assert said in str(fields_of(answer)["refused"])


@pytest.mark.parametrize("given", ['{"clients": 5}', '{"clients": {"a": 1}}', '{"clients": [5]}', "[]"])
def test_a_file_that_is_no_split_is_refused_in_a_line(given: str, tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(given)
    with pytest.raises(ConfigurationError, match=r"split: .* is no manifest\.json of a partition over these clients"):
        read_split(str(tmp_path / "split.json"), ["a"])


def test_options_of_a_run_that_mean_nothing_are_refused_in_a_line() -> None:
    config = {"wait": 0, "timeout": 0.5, "min-clients": 3}
    assert seconds_of(config, "wait", 0.0) == 0
    assert min_clients_of(config, 3) == 3
    for wait in (math.nan, math.inf, -1.0, "soon", None, True):
        with pytest.raises(ConfigurationError, match=r"--run-config: wait is a number of seconds, 0 or more; got"):
            seconds_of({"wait": wait}, "wait", 0.0)
    with pytest.raises(ConfigurationError, match=r"timeout is a number of seconds, 1 or more; got 0\.5"):
        seconds_of(config, "timeout", 1.0)
    for needed in (0, -1, 4, 1.5, "all", True, None):
        with pytest.raises(ConfigurationError, match=r"--run-config: min-clients is a whole number from 1 to 3; got"):
            min_clients_of({"min-clients": needed}, 3)


def test_privacy_is_accounted_for_in_what_is_written(deployed: Any, tmp_path: Path) -> None:
    private = ("--server=UserLevelPrivacy", "--server.noise_multiplier=1.0", "--server.noise_seed=entropy")
    agreed = agreement("FedVPT", "--data.clients_at_once=1", "--data.clients_per_round=11", *private)
    server, _ = deployed(agreed)
    server.meet()
    server.round(1)
    assert not server.refused
    server.evaluate(1)
    RunFolder(tmp_path).write(server)
    promised = read_record(tmp_path).privacy
    assert promised is not None
    assert promised["epsilon"] == pytest.approx(4.3772, rel=1e-3)
    assert promised["simulation"] is False
    assert not any("seed" in said for said in promised["not_covered"])


def test_strangers_are_told_apart_before_they_train(deployed: Any) -> None:
    agreed = agreement("FedVPT", *OPTIONS)
    server, wire = deployed(agreed)
    changes: dict[int, dict[str, Any]] = {
        0: {"client": 99},
        1: {"images": 10**6},
        2: {"frozen": "other"},
        3: {"versions": "benchmark 0, torch 1"},
        4: {"client": 5},
    }

    def spoil(client: int, answer: Message) -> Message:
        answer.content = content(**{**fields_of(answer), **changes.get(client, {})})
        return answer

    wire.spoil = spoil
    server.meet()
    assert sorted(server.clients.values()) == [5, 6, 7, 8, 9, 10]
    said = "\n".join(server.refused)
    for words in ("client 99", "has other frozen weights", "torch 1; the server", "is connected by another node"):
        assert words in said
    assert "says it has 1000000 images; expected 1 to 10" in said


def test_a_round_may_be_asked_for_again_and_none_before_it(deployed: Any) -> None:
    server, _ = deployed(agreement("FedPer", "--data.clients_at_once=1"))
    server.meet()
    server.round(1)
    before = {name: value.clone() for name, value in server.shared.items()}
    server.round(2)
    made = {name: value.clone() for name, value in server.shared.items()}
    assert not server.refused
    client._HERE.clear()  # as if every site's process were new
    server.shared = before
    server.round(2)
    assert not server.refused
    assert all(torch.equal(value, server.shared[name]) for name, value in made.items())
    server.round(1)
    both = {*server.rule.select(1)} & {*server.rule.select(2)}
    assert len(server.refused) == len(both) > 0
    assert all("round 1 was trained before" in line for line in server.refused)


class KilledError(Exception):
    """A server's process ends."""


@pytest.mark.parametrize("conf", ["PFedPG", *(pytest.param(c, marks=pytest.mark.slow) for c in ("FedPer", "FedMGP"))])
def test_killed_servers_and_sites_go_on_to_the_same_numbers(conf: str, deployed: Any, tmp_path: Path) -> None:
    """After each message to the clients the server is killed once, and all sites with it."""
    agreed = agreement(conf, *OPTIONS, *FEW)
    plain, wire = deployed(agreed)
    run(plain, RunFolder(tmp_path / "plain"), len(wire.nodes), 0.0, lambda seconds: None)
    server, wire = deployed(agreed)
    folder = RunFolder(tmp_path / "killed")
    lives, asked = [1, 2, 3, 3, 3, 3], 0  # exchanges of each process; the first one says hello

    def carry(messages: Iterable[Message], *, timeout: float | None = None, once: Any = wire.send_and_receive) -> Any:
        nonlocal asked
        answers, asked = [*once(messages, timeout=timeout)], asked + 1
        if lives and asked == lives[0]:
            raise KilledError
        return answers

    wire.send_and_receive = carry
    while True:
        try:
            run(server, folder, len(wire.nodes), 0.0, lambda seconds: None)
            break
        except KilledError:
            lives.pop(0)
            asked = 0
            client._HERE.clear()
            server = LiveServer(Agreement.read(agreed.text()), wire, 60.0, server.name)
    assert not lives
    assert not server.refused
    for name, value in plain.shared.items():
        assert torch.equal(server.shared[name], value), name
    assert [str(row) for row in server.metrics] == [str(row) for row in plain.metrics]
    with pytest.raises(ConfigurationError, match="names another deployment; give this one a new name"):
        folder.take_up(LiveServer(agreement("FedVPT"), wire, 60.0, server.name))


def test_the_record_is_the_simulations_and_says_that_it_was_deployed(deployed: Any, tmp_path: Path) -> None:
    agreed, split = Agreement.with_split(
        [
            *(f"--config={CONF / name}.yaml" for name in ("base", "FedVPT")),
            *OPTIONS,
            *FEW,
            f"--trainer.max_epochs={ROUNDS}",
        ]
    )
    server, wire = deployed(agreed)
    run(server, RunFolder(tmp_path / "run", split.manifest), len(wire.nodes), 0.0, lambda seconds: None)
    record = read_record(tmp_path / "run")
    assert verify_record(tmp_path / "run") == []
    torch.manual_seed(0)
    method, data = build("FedVPT", *OPTIONS, *FEW)
    trainer = fit(method, data, ROUNDS, settings=EACH_ROUND)
    expected = trainer.callbacks[0].record(trainer, method)
    for name in ("method", "dataset", "setting", "seed", "client_names", "test_sizes", "manifest_hash", "device"):
        assert getattr(record, name) == getattr(expected, name), name
    for name in ("rounds", "rounds_trained", "communication", "server", "default_server", "images_sha256"):
        assert getattr(record, name) == getattr(expected, name), name
    assert record.deployed is not None
    assert record.deployed["refused"] == []
    counted = record.communication["up_bytes"] * 4 * ROUNDS
    assert counted < record.deployed["up_bytes"] < counted + 2000 * 4 * ROUNDS  # names and shapes beside the numbers

    RunFolder(tmp_path / "own").write(server)
    assert verify_record(tmp_path / "own") == []
    assert read_record(tmp_path / "own").setting == "the sites' own images"


@pytest.mark.parametrize("conf", ["PFedPG", "FedBABU", pytest.param("FedPGP", marks=pytest.mark.slow)])
def test_a_site_uses_its_own_model_as_a_simulations_client(conf: str, deployed: Any, tmp_path: Path) -> None:
    options = (*OPTIONS, *FEW, "--data.clients_per_round=6")
    agreed = agreement(conf, *options)
    server, wire = deployed(agreed)
    run(server, RunFolder(tmp_path / "server"), len(wire.nodes), 0.0, lambda seconds: None)
    torch.manual_seed(0)
    method, data = build(conf, *options)
    fit(method, data, ROUNDS)
    images = data.pool.images[:6]
    site = TrainedRun(tmp_path / "sites" / server.name / "client3", device="cpu")
    expected = TrainedRun.of(method, data).predict(images, 3)
    pd.testing.assert_frame_equal(site.predict(images), expected)
    assert not TrainedRun.of(method, data).predict(images, 4).equals(expected)
    with pytest.raises(ConfigurationError, match="holds the model of client 3 alone, not of 4"):
        site.predict(images, 4)


def test_a_site_trains_on_its_own_folder_and_strange_classes_are_refused(deployed: Any, tmp_path: Path) -> None:
    server, wire = deployed(agreement("FedVPT", "--data.clients_at_once=1", "--data.clients_per_round=11"))
    pool = TinyImages().load()
    for row in range(8):
        split, folder = ("train", "test")[row % 2], f"class{int(pool.labels[row])}"
        (tmp_path / "own" / split / folder).mkdir(parents=True, exist_ok=True)
        pixels = pool.images[row].permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(tmp_path / "own" / split / folder / f"{row}.png")
        if row == 1:  # a copy of a test image does not train
            (tmp_path / "own" / "train" / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "own" / "train" / folder / "copy.png")
    wire.nodes = [103]
    wire.node_config = {"data": str(tmp_path / "own"), "client": server.agreement.client_names[3]}
    with pytest.warns(UserWarning, match="1 training images are copies of test images and do not train"):
        server.meet()
    assert server.sizes == {3: 4}
    server.round(1)
    server.evaluate(1)
    assert {row[1] for row in server.metrics} == {3}
    assert not server.refused

    (tmp_path / "own" / "train" / "horses").mkdir()
    wire.nodes, server.name = [104], f"run{next(_runs)}"
    server.meet()
    assert len(server.refused) == 1
    assert "horses, of which the run knows nothing; expected folders named as the run's classes" in server.refused[0]


def test_a_second_server_of_a_deployment_is_refused(deployed: Any, tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    server, _ = deployed(agreement("FedVPT", *OPTIONS))
    said = r"another server of this deployment writes to .* \(process \d+ on .*\); wait for it to end"
    with first.held(), pytest.raises(ConfigurationError, match=said):
        run(server, second, 1, 0.0, lambda seconds: None)
    with second.held():
        pass


def test_a_node_of_no_client_is_told_what_to_give(deployed: Any, tmp_path: Path) -> None:
    server, wire = deployed(agreement("FedVPT", *OPTIONS))
    wire.nodes, wire.node_config = [100], {"client": "nobody"}
    server.meet()
    assert not server.clients
    assert "node 100: this node is client 'nobody'; expected --node-config 'client=" in server.refused[0]
    with pytest.raises(ConfigurationError, match="round 1: 0 clients are connected, and the deployment needs 1"):
        run(server, RunFolder(tmp_path), 1, 0.0, lambda seconds: None)
    with pytest.raises(ConfigurationError, match=r"up to 100 letters, digits, .*; got '\.\./elsewhere'"):
        LiveServer(server.agreement, wire, 60.0, "../elsewhere")


def test_what_cannot_be_deployed_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    private = ("--server=UserLevelPrivacy", "--server.noise_multiplier=1.0")
    with pytest.raises(ConfigurationError, match="clients that never train"):
        agreement("FedVPT", "--data.new_clients=0.2")
    with pytest.raises(ConfigurationError, match="labels are flipped on purpose"):
        agreement("FedVPT", "--data.label_flipping=0.3")
    with pytest.raises(ConfigurationError, match=r"corrupted images .* are scored in a simulation alone"):
        agreement("FedVPT", "--data.corruptions=default")
    with pytest.raises(ConfigurationError, match=r"record-level privacy .* has noise from the run's seed"):
        agreement("FedVPT", "--data.record_privacy={clip: 1.0, noise_multiplier: 1.0}")
    with pytest.raises(ConfigurationError, match="a deployment's network is its delivery"):
        agreement("FedVPT", "--delivery=Validation")
    with pytest.raises(ConfigurationError, match=r"draws its noise from the run's seed"):
        agreement("FedVPT", *private)
    hidden = ("--server.sampling=poisson", "--server.noise_seed=entropy", "--data.clients_per_round=4")
    with pytest.raises(ConfigurationError, match="all know here who takes part in a round"):
        agreement("FedVPT", *private, *hidden)
    with pytest.raises(ConfigurationError, match="with noise: local would be added by the server here"):
        agreement("FedVPT", *private, "--server.noise=local", "--server.noise_seed=entropy")
    for option, said in (
        ("--trainer.accelerator=gpu", "compute in one process on the CPU each; .* got gpu"),
        ("--trainer.limit_train_batches=0.1", "cut a round short"),
        ("--data.on_divergence=raise", "data.on_divergence is a simulation's, got 'raise'"),
        ("--data.keep_predictions=last", "data.keep_predictions is a simulation's, got 'last'"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            agreement("FedVPT", option)
    for text, said in (("", "is no JSON"), ("{}", "the app's agreement"), (7, "holds no agreement")):
        with pytest.raises(ConfigurationError, match=said):
            Agreement.read(text)
    there = tmp_path / "there"
    there.mkdir()
    assert main(["deploy", "app", "configs/fedvpt_digits.yaml", str(there)]) == 2
    assert "exists; name a new folder" in capsys.readouterr().err
    monkeypatch.setattr("benchmark.deploy.app.find_spec", lambda name: None)
    assert main(["deploy", "app", "configs/fedvpt_digits.yaml", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.strip().endswith("pip install '.[flower]'")


def test_an_app_is_complete_and_flower_builds_it(tmp_path: Path) -> None:
    import tomllib

    from flwr.cli.build import build_fab_from_disk

    agreed = agreement("FedVPT", *OPTIONS)
    write_app(agreed, tmp_path / "app")
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    assert json.loads(project["tool"]["flwr"]["app"]["config"]["agreement"]) == json.loads(agreed.text())
    assert build_fab_from_disk(tmp_path / "app")
    for part in ("server", "client"):
        source = (tmp_path / "app" / "federated_app" / f"{part}_app.py").read_text()
        made: dict[str, Any] = {}
        exec(compile(source, part, "exec"), made)
        assert type(made["app"]).__name__ == f"{part.capitalize()}App"
