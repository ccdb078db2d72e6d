"""An operator's commands: keys, the server's, a site's, and a whole deployment on one machine."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image

from benchmark.commands import main
from benchmark.errors import ConfigurationError

pytest.importorskip("flwr", reason="the extra flower is not installed")

from safetensors import safe_open
from safetensors.torch import load_file

from benchmark.deploy.agreement import Agreement
from benchmark.deploy.in_process import FIRST, InProcess
from benchmark.deploy.keys import write_keys
from benchmark.deploy.machines import connection
from benchmark.deploy.server import LiveServer
from benchmark.records.record import RunRecord
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from benchmark.run.reload import restore
from datamodules.pixels import Decoding

CONFIG = "configs/fedvpt_digits.yaml"
#: Two clients of the digits, as a simulation and a deployment agree to the bit.
TWO = (
    "--data.partition=datamodules.partition.IID",
    "--data.partition.num_clients=2",
    "--data.clients_at_once=1",
    "--data.cache_features=false",
    "--trainer.max_epochs=2",
    "--trainer.check_val_every_n_epoch=2",
    "--trainer.num_sanity_val_steps=0",
)


def test_keys_are_of_one_root_and_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "keys", str(tmp_path / "keys"), "--host", "hub.org", "--host", "10.0.0.7", "north"]) == 0
    folder = tmp_path / "keys"
    assert {path.name for path in folder.iterdir()} == {"ca.pem", "server.pem", "server.key", "north.key", "north.pub"}
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.suffix == ".key" else 0o644)
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

    root, server = (x509.load_pem_x509_certificate((folder / name).read_bytes()) for name in ("ca.pem", "server.pem"))
    server.verify_directly_issued_by(root)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["hub.org", "localhost"]
    assert [str(each) for each in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1"]
    own = load_ssh_private_key((folder / "north.key").read_bytes(), None)
    assert own.public_key() == load_ssh_public_key((folder / "north.pub").read_bytes())
    assert main(["deploy", "keys", str(folder), "--host", "hub.org", "north"]) == 2
    assert "exists; keys are made once" in capsys.readouterr().err
    for site in ("../north", "server"):
        with pytest.raises(ConfigurationError, match=r"letters, digits|can't be called server"):
            write_keys(tmp_path / "other", ["hub.org"], [site])
    for hosts, sites, said in (
        (["hub.org"], ["north", "North"], "two sites are called North"),
        (["hüb.org"], ["north"], "a host's name in a certificate is ASCII, got 'hüb.org'"),
        *(
            ([host], ["north"], f"--host: expected an IP address or a name .* got '{re.escape(host)}'")
            for host in ("", "a b", "hub.org:8000", "https://hub.org", "hub..org", "-hub.org", "300.1.1.1", "a" * 64)
        ),
    ):
        with pytest.raises(ConfigurationError, match=said):
            write_keys(tmp_path / "other", hosts, sites)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]
    if shutil.which("openssl"):
        command = ["openssl", "verify", "-CAfile", str(folder / "ca.pem"), str(folder / "server.pem")]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def typed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    """Exit status, printed words and complaint of ``benchmark deploy``."""
    status = main(["deploy", *arguments, "--print"])
    said = capsys.readouterr()
    return status, shlex.split(said.out.strip().splitlines()[-1]) if status == 0 else [], said.err.strip()


def test_commands_have_tls_beyond_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys"
    write_keys(keys, ["hub.org"], ["north"])
    status, words, _ = typed(capsys, "server")
    assert status == 0
    assert words[0].endswith("flower-superlink")
    assert {"--insecure", "--host=127.0.0.1", "--port=8000"} < {*words}
    status, words, _ = typed(capsys, "server", "--host=0.0.0.0", f"--keys={keys}")
    assert {"--enable-supernode-auth", f"--ssl-keyfile={keys / 'server.key'}", "--host=0.0.0.0"} < {*words}
    assert "--insecure" not in words
    (tmp_path / "own").mkdir()
    secured = (f"--root={keys / 'ca.pem'}", f"--key={keys / 'north.key'}")
    status, words, _ = typed(
        capsys, "client", "--name=north", "--server=hub.org:8000", *secured, f"--data={tmp_path / 'own'}"
    )
    assert status == 0
    assert words[words.index("--node-config") + 1] == f'client="north" data="{tmp_path / "own"}"'
    assert {f"--root-certificates={keys / 'ca.pem'}", f"--auth-supernode-private-key={keys / 'north.key'}"} < {*words}
    text = connection("hub.org:8000", keys / "ca.pem")
    assert f'root-certificates = "{keys / "ca.pem"}"' in text
    assert "insecure" not in text

    for arguments, said in (
        (("server", "--host=0.0.0.0"), "without TLS a deployment stays on this machine"),
        (("server", "--host=0.0.0.0", f"--keys={tmp_path}"), "ca.pem is missing; `benchmark deploy keys` writes it"),
        (("client", "--name=a", "--server=hub.org:8000"), "hub.org is another machine; make keys"),
        (
            ("client", "--name=a", "--server=hub.org"),
            "--server is a host and a port, such as hub.example.org:8000; got",
        ),
        (("client", "--name=a", "--server=localhost:1", secured[0]), "--root and --key belong together"),
        (("client", "--name=a", "--server=localhost:1", "--data=nowhere"), "--data: nowhere is no folder"),
        (("client", '--name=a"', "--server=localhost:1"), "quotes and backslashes can't be given to Flower"),
        (("client", "--name=a", "--server=localhost:1", f"--app={tmp_path}"), "is no app of `benchmark deploy app`"),
    ):
        status, _, complaint = typed(capsys, *arguments)
        assert status == 2
        assert said in complaint
        assert len(complaint.splitlines()) == 1


def test_flwr_is_told_the_address_on_which_the_server_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    write_keys(keys, ["hub.org", "fd00::7", "hub.internal."], ["north"])
    for host, address in (
        ("10.0.0.7", "10.0.0.7:8000"),
        ("hub.org", "hub.org:8000"),
        ("fd00::7", "[fd00::7]:8000"),
        ("[fd00::7]", "[fd00::7]:8000"),
        ("0.0.0.0", "127.0.0.1:8000"),
        ("::", "127.0.0.1:8000"),
    ):
        assert main(["deploy", "server", f"--host={host}", f"--keys={keys}", "--print"]) == 0
        assert f'address = "{address}"' in capsys.readouterr().out


def test_an_app_for_folders_that_nobody_else_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sites = (
        "{class_path: datamodules.Sites, init_args: {sites: [north, south], classes: [cat, dog], most: 9, size: 32}}"
    )
    options = [f"--data.source={sites}", "--trainer.max_epochs=2"]
    assert main(["deploy", "app", CONFIG, str(tmp_path / "app"), *options]) == 0
    agreement = Agreement.of([f"--config={CONFIG}", *options])
    assert (agreement.client_names, agreement.class_names) == (("north", "south"), ("cat", "dog"))
    assert agreement.terms.own_row == 9
    assert agreement.decoding == Decoding(32, "squash", as_seen=True)
    for option in ("--data.val_fraction=0.2", "--data.val_only=true"):
        with pytest.raises(ConfigurationError, match="a site trains on all of its folder train; leave it out"):
            Agreement.of([f"--config={CONFIG}", *options, "--data.val_fraction=0.2", option])
    folder = tmp_path / "own"
    for split, label in (("train", "cat"), ("train", "dog"), ("test", "dog")):
        (folder / split / label).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(folder / split / label / "1.png")
    site = ("client", "--server=localhost:1", f"--app={tmp_path / 'app'}")
    capsys.readouterr()
    assert typed(capsys, *site, "--name=north", f"--data={folder}")[0] == 0
    assert "east is none of the clients north, south" in typed(capsys, *site, "--name=east")[2]
    (folder / "train" / "cow").mkdir()
    complaint = typed(capsys, *site, "--name=north", f"--data={folder}")[2]
    assert "cow, of which the run knows nothing; expected folders named as the run's classes: cat, dog" in complaint
    from benchmark.run.cli import main as fit

    with pytest.raises(SystemExit):
        fit(["fit", f"--config={CONFIG}", *options, f"--run_dir={tmp_path / 'run'}"])
    assert "the images of Sites are at the sites" in capsys.readouterr().err


def beside_its_simulation(folder: Path, run_dir: Path, *arguments: str) -> tuple[RunRecord, RunRecord]:
    """Simulate what was deployed in a folder, compare values and scores, and return the records of both."""
    from benchmark.run.cli import main as fit

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fit(["fit", f"--config={arguments[0]}", *arguments[1:], f"--run_dir={run_dir}"])
    torch.set_num_threads(threads)
    method, _ = restore(run_dir)
    for name, value in load_file(folder / "server" / "shared.safetensors").items():
        assert torch.equal(value, method.get_parameter(name)), name
    order = ["round", "point", "split", "metric", "client"]
    tables = [pd.read_parquet(each / "metrics.parquet").sort_values(order) for each in (folder / "server", run_dir)]
    pd.testing.assert_frame_equal(*(table.reset_index(drop=True) for table in tables), rtol=1e-6)
    return read_record(folder / "server"), read_record(run_dir)


def test_processes_on_this_machine_are_the_simulation_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's server and two nodes, each task a process of its own; with the simulation's numbers and its record."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "deployed"
    assert main(["deploy", "local", CONFIG, str(folder), *TWO]) == 0
    assert "round 2: test accuracy" in capsys.readouterr().out
    assert verify_record(folder / "server") == []
    deployed, simulated = beside_its_simulation(folder, tmp_path / "simulated", CONFIG, *TWO)
    assert (deployed.config_hash, deployed.manifest_hash) == (simulated.config_hash, simulated.manifest_hash)
    assert deployed.communication == simulated.communication
    assert main(["deploy", "local", CONFIG, str(folder), *TWO]) == 2
    assert "holds a finished deployment" in capsys.readouterr().err
    assert main(["predict", str(folder / "client1"), str(_an_image(tmp_path))]) == 0
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout
    assert not left.split()


#: Families of methods with the files that configure them.
FAMILIES = {
    "fedavg": ("configs/fedavg_digits.yaml",),
    "fedvpt": ("configs/fedvpt_digits.yaml",),
    "pfedpg": ("configs/pfedpg_digits.yaml",),
    "pfedbayespt": ("configs/pfedbayespt_digits.yaml",),
    "fedpgp": ("configs/suites/digits_clip.yaml", "--config=configs/methods/fedpgp.yaml"),
    "fedbabu": ("configs/suites/digits.yaml", "--config=configs/methods/fedbabu.yaml"),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_three_nodes_have_the_simulations_tensors_and_scores(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared and personal tensors after three rounds, and all that was scored."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder, (config, *more) = tmp_path / "deployed", FAMILIES[family]
    options = (*more, *TWO[:-3], "--data.partition.num_clients=3", "--trainer.max_epochs=3", *TWO[-1:])
    assert main(["deploy", "local", config, str(folder), *options]) == 0
    beside_its_simulation(folder, tmp_path / "simulated", config, *options)
    method, _ = restore(tmp_path / "simulated")
    for client in range(3):
        own = load_file(folder / f"client{client}.safetensors")
        assert {*method.roles.personal} <= {*own}
        for name in method.roles.personal:
            assert torch.equal(own[name], method.store.all_rows(name)[client]), (client, name)


@pytest.mark.slow
def test_processes_whose_uploads_are_summed_are_near_to_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = tmp_path / "deployed"
    assert main(["deploy", "local", "--secure_aggregation", CONFIG, str(folder), *TWO]) == 0
    record = read_record(folder / "server")
    assert record.deployed is not None
    assert record.deployed["refused"] == []
    assert record.deployed["secure_aggregation"] == {"largest_change": 8.0, "levels": 2**24}
    from benchmark.run.cli import main as fit

    fit(["fit", f"--config={CONFIG}", *TWO, f"--run_dir={tmp_path / 'simulated'}"])
    method, _ = restore(tmp_path / "simulated")
    for name, value in load_file(folder / "server" / "shared.safetensors").items():
        torch.testing.assert_close(value, method.get_parameter(name), rtol=0, atol=1e-4)  # after two rounds


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedvpt", "pfedpg", "pfedbayespt"])
def test_a_killed_deployment_goes_on_to_the_simulations_numbers(method: str, tmp_path: Path) -> None:
    """The command and all of Flower's processes are killed in the second round, and the command is given again."""
    folder, config = tmp_path / "deployed", f"configs/{method}_digits.yaml"
    options = (*TWO[:-3], "--trainer.max_epochs=3", *TWO[-2:])
    options = tuple(each.replace("every_n_epoch=2", "every_n_epoch=1") for each in options)
    command = [sys.executable, "-m", "benchmark.commands", "deploy", "local", config, str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("round 1:"):
                break
        time.sleep(4)  # within the messages of the second round
        os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(["pkill", "-9", "-f", str(folder)], check=False)
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=900)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "round 1 of 3" not in again.stdout
    assert "round 3 of 3: 2 of 2 clients" in again.stdout
    deployed, simulated = beside_its_simulation(folder, tmp_path / "simulated", config, *options)
    assert deployed.config_hash == simulated.config_hash


def processes_of(words: tuple[str, ...]) -> list[int]:
    """Processes whose command has all of these in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().decode(errors="replace")
            found += [int(path.parent.name)] if all(word in command for word in words) else []
    return found


@pytest.mark.slow
def test_a_site_that_is_killed_in_a_round_is_back_in_a_later_one(tmp_path: Path) -> None:
    """Its SuperNode is killed with all it has started in the second of three rounds, and started again."""
    folder = tmp_path / "deployed"
    options = [each for each in TWO if "max_epochs" not in each] + ["--trainer.max_epochs=3"]
    options = [each.replace("every_n_epoch=2", "every_n_epoch=3") for each in options]
    agreed = Agreement.of([f"--config={CONFIG}", *options])
    command = [sys.executable, "-m", "benchmark.commands", "deploy", "local", CONFIG, str(folder), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    said = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        again = None
        try:
            for line in process.stdout:
                said.append(line)
                if line.startswith("round 1 of 3"):
                    time.sleep(2)  # its process of the second round is starting
                    (node,) = processes_of(("flower-supernode", f'client="{agreed.client_names[1]}"', str(tmp_path)))
                    known = Path(f"/proc/{node}")
                    words = known.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
                    given = dict(
                        each.split("=", 1) for each in known.joinpath("environ").read_bytes().decode().split("\0")[:-1]
                    )
                    os.killpg(node, signal.SIGKILL)
                    with safe_open(str(folder / "client1.safetensors"), "pt") as file:
                        assert file.metadata()["round"] == "1"
                    again = subprocess.Popen(words, env=given, start_new_session=True, stdout=subprocess.DEVNULL)
        finally:
            if again is not None:
                os.killpg(again.pid, signal.SIGTERM)
                again.wait(60)
    assert process.returncode == 0, said
    counts = [line for line in said if " clients," in line and line.startswith("round ")]
    assert ["1 of 2" in line for line in counts] == [False, True, False], said

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    wire = InProcess(agreed, tmp_path / "sites")
    server = LiveServer(agreed, wire, 60.0, "run")
    for number, nodes in enumerate(([FIRST, FIRST + 1], [FIRST], [FIRST, FIRST + 1]), start=1):
        wire.nodes = nodes
        server.meet()
        server.round(number)
    torch.set_num_threads(threads)
    for name, value in load_file(folder / "server" / "shared.safetensors").items():
        assert torch.equal(value, server.shared[name]), name
    record = read_record(folder / "server")
    assert record.deployed is not None
    assert len(record.deployed["refused"]) > 0


def _an_image(folder: Path) -> Path:
    path = folder / "image.png"
    Image.new("RGB", (32, 32), "white").save(path)
    return path
