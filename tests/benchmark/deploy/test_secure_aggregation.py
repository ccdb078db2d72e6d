"""Secure aggregation of a deployment: the plain run within its rounding, nothing in the clear, and what is refused."""

import io
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import CONF

from benchmark.errors import ConfigurationError

pytest.importorskip("flwr", reason="the extra flower is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from safetensors.torch import load_file

from benchmark.commands import main
from benchmark.deploy import masked_uploads, summed_uploads
from benchmark.deploy.agreement import LARGEST_CHANGE, LEVELS, Agreement
from benchmark.deploy.in_process import FIRST, InProcess
from benchmark.deploy.messages import RECORD, content, fields_of
from benchmark.deploy.outcome import RunFolder
from benchmark.deploy.server import LiveServer, run
from benchmark.records.record_file import read_record

#: Six clients of 1 to 6 images, of whom four take part in a round.
OPTIONS = (
    "--data.partition=federation.Few",
    "--data.clients_per_round=4",
    "--data.clients_at_once=1",
    "--data.cache_features=false",
)


@lru_cache
def agreement(conf: str, *options: str, secure_aggregation: bool = True) -> Agreement:
    """Return the agreement that the command would put into an app."""
    files = [f"--config={CONF / name}.yaml" for name in ("base", conf)]
    return Agreement.of([*files, *OPTIONS, "--trainer.max_epochs=2", *options], secure_aggregation)


class Wire(InProcess):
    """Keeps all answers, by stage of the protocol, and changes them.

    Args:
        agreement: of the deployment.
        folder: in which clients keep what is their own.
    """

    def __init__(self, agreement: Agreement, folder: Path) -> None:
        super().__init__(agreement, folder)
        self.answers: list[tuple[str, Message]] = []
        #: changes what a client answers in a stage
        self.spoil: Callable[[int, str, Message], None] = lambda client, stage, answer: None

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterator[Message]:
        """Have the clients answer."""
        sent = [*messages]
        asked = sent[0].content.config_records.get(RECORD_KEY_CONFIGS)
        stage = "" if asked is None else str(asked[Key.STAGE])
        for answer in super().send_and_receive(sent, timeout=timeout):
            self.spoil(answer.metadata.src_node_id - FIRST, stage, answer)
            self.answers.append((stage, answer))
            yield answer


def started(agreed: Agreement, folder: Path) -> tuple[LiveServer, Wire]:
    """A server that knows its clients."""
    wire = Wire(agreed, folder)
    server = LiveServer(agreed, wire, 60.0, "run")
    server.meet()
    return server, wire


def gone_in(lost: int, when: str) -> Callable[[int, str, Message], None]:
    """Have one client be gone in a stage."""

    def spoil(client: int, stage: str, answer: Message) -> None:
        if (client, stage) == (lost, when):
            answer.content = content(refused="gone")

    return spoil


def rounding(server: LiveServer, clients: Iterable[int]) -> float:
    """Return the largest rounding error of the securely summed mean of these clients' changes, of at most 1 each."""
    shares = [server.sizes[client] / server.terms.own_row for client in clients]
    step, of_a_weight = 2 * LARGEST_CHANGE / LEVELS, 0.5 / LEVELS
    return len(shares) * (step + 2 * of_a_weight) / sum(shares)


@pytest.mark.parametrize("lost", [None, "collect_masked_vectors"])
def test_the_sum_is_the_plain_mean_up_to_its_rounding(lost: str | None, tmp_path: Path) -> None:
    hidden, wire = started(agreement("FedPer"), tmp_path / "hidden")
    plain, seen = started(agreement("FedPer", secure_aggregation=False), tmp_path / "plain")
    chosen = hidden.rule.select(1)
    there = [client for client in chosen if client != chosen[1] or lost is None]
    if lost is not None:
        wire.spoil, seen.spoil = gone_in(chosen[1], lost), gone_in(chosen[1], "")
    before = {name: value.clone() for name, value in plain.shared.items()}
    for server in (hidden, plain):
        server.round(1)
    bound = rounding(plain, there)
    assert bound < 1e-5
    for name, value in plain.shared.items():
        assert 0 < (value - before[name]).abs().max() < 1
        torch.testing.assert_close(hidden.shared[name], value, rtol=3e-7, atol=bound)
    assert hidden.traffic.rounds == plain.traffic.rounds
    assert hidden._reported == plain._reported
    # What each keeps for itself is that of the plain run to the bit: it has trained from the same values.
    for client in chosen:
        kept, expected = (
            load_file(tmp_path / of / "run" / f"client{client}.safetensors") for of in ("hidden", "plain")
        )
        assert kept.keys() == expected.keys() != set()
        assert all(torch.equal(value, kept[name]) for name, value in expected.items())


def test_no_upload_leaves_in_the_clear(tmp_path: Path) -> None:
    agreed = agreement("FedVPT", "--trainer.max_epochs=1")
    server, wire = started(agreed, tmp_path / "sites")
    run(server, RunFolder(tmp_path / "server"), 6, 0.0, lambda seconds: None)
    assert not server.refused
    vectors = []
    for stage, answer in wire.answers:
        if RECORD in answer.content:
            assert "tensors" not in fields_of(answer)
        assert all(len(record) == 0 for record in answer.content.array_records.values())
        if stage == Stage.COLLECT_MASKED_VECTORS:
            masked = answer.content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
            vectors.append(np.load(io.BytesIO(masked[1])) / summed_uploads.MODULUS)
    assert len(vectors) == 4
    for vector in vectors:  # spread over all values, where changes would lie in the middle of a 256th
        assert len(vector) == sum(value.numel() for value in server.shared.values())
        assert np.histogram(vector, bins=4, range=(0, 1))[0].min() > len(vector) / 8
    record = read_record(tmp_path / "server")
    assert record.deployed is not None
    assert record.deployed["secure_aggregation"] == {"largest_change": 8.0, "levels": 2**24}
    assert record.deployed["up_bytes"] > 4 * 8 * len(vectors[0])


def test_a_site_answers_no_server_that_would_see_its_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agreed, plain = agreement("FedVPT"), agreement("FedVPT", secure_aggregation=False)
    wire = Wire(agreed, tmp_path)
    server = LiveServer(plain, wire, 60.0, "run")
    server.meet()
    server.round(1)
    assert len(server.refused) == 4
    assert all(
        "asks for an upload in the clear, and secure aggregation was agreed on" in said for said in server.refused
    )

    wire = Wire(plain, tmp_path)
    wire.node_config = {"secure-aggregation": "only"}
    server = LiveServer(plain, wire, 60.0, "other")
    server.meet()
    assert not server.clients
    assert "this site takes part in secure aggregation alone, which the app has not" in server.refused[0]

    server, wire = started(agreed, tmp_path / "sites")
    monkeypatch.setattr(summed_uploads, "THRESHOLD", 0.5)
    server.round(1)
    assert "among 4 clients, with 4 shares of which 2 unmask; expected a share for each, and more than half" in str(
        server.refused
    )
    monkeypatch.setattr(summed_uploads, "THRESHOLD", 0.67)

    def refusal(node: int, stage: str, **asked: Any) -> str:
        record = ConfigRecord({Key.STAGE: stage, **asked})
        message = Message(RecordDict({RECORD_KEY_CONFIGS: record, **server._content()}), node, "train")
        (answer,) = wire.send_and_receive([message])
        return str(fields_of(answer)["refused"]) if RECORD in answer.content else ""

    for node in wire.nodes:  # as if the server asked for both secrets of a client
        asked = {Key.ACTIVE_NODE_ID_LIST: [node], Key.DEAD_NODE_ID_LIST: [node]}
        assert "asks for both secrets of a client" in refusal(node, Stage.UNMASK, **asked)
    asked = {Key.ACTIVE_NODE_ID_LIST: [FIRST, FIRST], Key.DEAD_NODE_ID_LIST: []}
    assert "counts a client twice" in refusal(FIRST, Stage.UNMASK, **asked)
    # A sum over one client is its upload, and so is one in which the others of the announced are the server itself.
    terms = masked_uploads.terms_of(agreed)
    for clients, unmask in ((1, 1), (4, 5)):
        numbers = {Key.SAMPLE_NUMBER: clients, Key.SHARE_NUMBER: clients, Key.THRESHOLD: unmask}
        said = f"among {clients} clients, with {clients} shares of which {unmask} unmask"
        assert said in refusal(FIRST, Stage.SETUP, **numbers, **terms)
    numbers = {Key.SAMPLE_NUMBER: 3, Key.SHARE_NUMBER: 3, Key.THRESHOLD: 2}
    assert refusal(FIRST, Stage.SETUP, **numbers, **terms) == ""
    (own,) = (answer for stage, answer in wire.answers[-1:])
    keys = [own.content.config_records[RECORD_KEY_CONFIGS][name] for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)]
    for others in ({}, {"7": [b"a", b"b"]}, {str(node): [bytes([node]), b"c"] for node in range(7, 10)}):
        said = f"the server has announced 3 clients, and sends the keys of {1 + len(others)}"
        assert said in refusal(FIRST, Stage.SHARE_KEYS, **{str(FIRST): keys, **others})
    twice = {str(FIRST): keys, "7": keys, "8": [b"a", b"b"]}
    assert "Some public keys are identical" in refusal(FIRST, Stage.SHARE_KEYS, **twice)


def test_a_round_that_was_summed_is_not_summed_again(tmp_path: Path) -> None:
    server, _ = started(agreement("FedPer"), tmp_path)
    server.round(1)
    before = {name: value.clone() for name, value in server.shared.items()}
    server.round(1)  # as a server that was killed in the round would ask
    assert len(server.refused) == 4
    assert all("answers once in a round that is summed" in said for said in server.refused)
    assert server.facts["void"] == {1: 1.0}
    assert all(torch.equal(value, before[name]) for name, value in server.shared.items())


def zipped() -> bytes:
    """Return arrays in a form that numpy reads, too, but not as one array."""
    np.savez(stream := io.BytesIO(), a=np.zeros(1))
    return stream.getvalue()


def header(*shape: int) -> bytes:
    """Return the beginning of an array that would not fit into any memory."""
    described = {"descr": "<i8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream := io.BytesIO(), described)
    return stream.getvalue()


def other_key(number: int) -> bytes:
    """Return a public key of another curve than Flower's."""
    return public_key_to_bytes(ec.derive_private_key(number, ec.SECP256R1()).public_key())


def junk_shares(given: Any) -> ConfigRecord:
    """Return shares of all secrets, which are none."""
    return ConfigRecord({**given, Key.SHARE_LIST: [b"z" for _ in given[Key.SHARE_LIST]]})


#: By case the stage, what a client answers in place of its own answer, and what the server says of it. None: its
#: answer without this package's record.
SPOILED: dict[str, tuple[str, Any, str]] = {
    "no key": (Stage.SETUP, {Key.PUBLIC_KEY_1: 7}, "no two public keys"),
    "lists": (Stage.SETUP, {Key.PUBLIC_KEY_1: [b"x"], Key.PUBLIC_KEY_2: [7]}, "no two public keys"),
    "no PEM": (Stage.SETUP, {Key.PUBLIC_KEY_1: b"x", Key.PUBLIC_KEY_2: b"y"}, "no two public keys"),
    "other curve": (
        Stage.SETUP,
        {Key.PUBLIC_KEY_1: other_key(1), Key.PUBLIC_KEY_2: other_key(2)},
        "no two public keys",
    ),
    "one share": (Stage.SHARE_KEYS, {Key.DESTINATION_LIST: [1], Key.CIPHERTEXT_LIST: []}, "no shares for each other"),
    "no shares": (Stage.SHARE_KEYS, {Key.DESTINATION_LIST: [5], Key.CIPHERTEXT_LIST: [b""]}, "no shares for each"),
    "pickle": (Stage.COLLECT_MASKED_VECTORS, {Key.MASKED_PARAMETERS: [b"\x80\x04\x95pickle"]}, "no masked numbers"),
    "zip": (Stage.COLLECT_MASKED_VECTORS, {Key.MASKED_PARAMETERS: [zipped(), zipped()]}, "no masked numbers"),
    "huge": (Stage.COLLECT_MASKED_VECTORS, {Key.MASKED_PARAMETERS: [header(1), header(10**15)]}, "no masked numbers"),
    "half": (
        Stage.COLLECT_MASKED_VECTORS,
        lambda given: ConfigRecord(
            {Key.MASKED_PARAMETERS: [given[Key.MASKED_PARAMETERS][0], given[Key.MASKED_PARAMETERS][1][:-8]]}
        ),
        "no masked numbers",
    ),
    "no record": (Stage.COLLECT_MASKED_VECTORS, None, "nothing of its training"),
    "other client": (Stage.UNMASK, {Key.NODE_ID_LIST: [99], Key.SHARE_LIST: [b""]}, "no share of each secret"),
    "nothing": (Stage.UNMASK, {Key.NODE_ID_LIST: [], Key.SHARE_LIST: []}, "no share of each secret"),
    "junk": (Stage.UNMASK, junk_shares, "shares of another form"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_an_answer_out_of_form_counts_as_none(case: str, tmp_path: Path) -> None:
    stage, given, said = SPOILED[case]
    server, wire = started(agreement("FedVPT"), tmp_path)
    chosen = server.rule.select(1)
    before = {name: value.clone() for name, value in server.shared.items()}

    def spoil(client: int, now: str, answer: Message) -> None:
        if (client, now) == (chosen[0], stage):
            configs = answer.content.config_records
            if given is None:
                del configs[RECORD]
            else:
                configs[RECORD_KEY_CONFIGS] = (
                    given(configs[RECORD_KEY_CONFIGS]) if callable(given) else ConfigRecord(given)
                )

    wire.spoil = spoil
    server.round(1)
    assert any(not torch.equal(value, before[name]) for name, value in server.shared.items())
    assert len(server.refused) == 1
    assert server.refused[0].startswith(f"round 1: {server._who(chosen[0])} sends {said}")
    assert server.traffic.rounds[-1][0] == 4
    one = sum(value.numel() for value in server.shared.values())
    assert server.traffic.rounds[-1][4] == one * (4 if stage == Stage.UNMASK else 3)


def test_keys_that_two_clients_send_are_not_handed_on(tmp_path: Path) -> None:
    server, wire = started(agreement("FedVPT"), tmp_path)
    chosen = server.rule.select(1)
    last = chosen[-1]  # the first to answer
    seen: list[ConfigRecord] = []

    def spoil(client: int, now: str, answer: Message) -> None:
        if now == Stage.SETUP and client in (chosen[0], last):
            seen.append(answer.content.config_records[RECORD_KEY_CONFIGS])
            answer.content.config_records[RECORD_KEY_CONFIGS] = seen[0]

    wire.spoil = spoil
    server.round(1)
    both = {f"round 1: {server._who(client)} sends keys that another client sends, too" for client in (chosen[0], last)}
    assert {*server.refused} == both
    assert server.traffic.rounds[-1][0] == 4
    assert "void" not in server.facts


def test_shares_that_nobody_can_read_are_told_in_a_line(tmp_path: Path) -> None:
    server, wire = started(agreement("FedVPT"), tmp_path)
    chosen = server.rule.select(1)

    def spoil(client: int, now: str, answer: Message) -> None:
        if (client, now) == (chosen[0], Stage.SHARE_KEYS):
            given = answer.content.config_records[RECORD_KEY_CONFIGS]
            junk = [b"z" for _ in given[Key.CIPHERTEXT_LIST]]
            answer.content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord({**given, Key.CIPHERTEXT_LIST: junk})

    wire.spoil = spoil
    server.round(1)
    assert server.facts["void"] == {1: 1.0}
    assert len(server.refused) == 3
    assert all("another client's shares cannot be read" in said for said in server.refused)


def test_what_has_to_see_single_uploads_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for conf, options, said in (
        (
            "FedTPG",
            (),
            r"FedTPG cannot have secure aggregation: its server's rule EqualMean weighs clients alike, and sums",
        ),
        ("PFedPG", (), r"PFedPG cannot have secure aggregation: its server's rule \w+ reads each upload by itself"),
        (
            "FedVPT",
            ("--server=RobustAggregation", "--server.tolerated=1"),
            r"its server's rule RobustAggregation\(.*\) reads each upload by itself, which is hidden",
        ),
        ("Local", (), "its clients send nothing"),
        ("FedVPT", ("--data.clients_per_round=1",), "a round has 1 clients, expected 2 to 128"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            agreement(conf, *options)
    agreement("FedVPT", "--server=FedAdam", "--server.lr=0.1")  # a step along the mean
    arguments = ["configs/fedvpt_digits.yaml", str(tmp_path / "app")]
    assert main(["deploy", "app", *arguments]) == 0
    site = ["deploy", "client", "--name=upright", "--server=localhost:1", f"--app={tmp_path / 'app'}", "--print"]
    assert main([*site, "--secure_aggregation"]) == 2
    assert "has none; ask for an app that was made with it" in capsys.readouterr().err
