"""Two hospitals and a hub, each in a network namespace of its own, with TLS and keys; run by name, as root."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("flwr", reason="the extra flower is not installed")

from benchmark.commands import main
from benchmark.deploy.machines import connection
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import verify_record
from datamodules import DigitDomains

BIN = Path(sys.executable).parent
SITES = {"north": "10.77.1", "south": "10.77.2"}
PORT = 8123


def do(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture
def networks() -> Iterator[None]:
    """Namespaces ``fed-hub``, ``fed-north`` and ``fed-south``; each site has a line to the hub, and no other."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the program ip")
    names = ("fed-hub", *(f"fed-{site}" for site in SITES))
    try:
        for name in names:
            do("ip", "netns", "add", name)
            do("ip", "-n", name, "link", "set", "lo", "up")
        for site, net in SITES.items():
            ends = {f"hub-{site}": ("fed-hub", f"{net}.1"), f"{site}-hub": (f"fed-{site}", f"{net}.2")}
            first, second = ends
            do("ip", "link", "add", first, "type", "veth", "peer", "name", second)
            for end, (name, address) in ends.items():
                do("ip", "link", "set", end, "netns", name)
                do("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
                do("ip", "-n", name, "link", "set", end, "up")
    except subprocess.CalledProcessError:
        pytest.skip("no network namespaces on this machine")
    try:
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes that a test has started, by name; they are ended with it."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    yield running
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        time.sleep(2)


def write_images(folder: Path, domain: int) -> None:
    """A site's folder: eighty images to train on and forty to be tested on, of the digits."""
    source = DigitDomains()
    pool = source.load()
    for split, test, count in (("train", False, 80), ("test", True, 40)):
        rows = ((pool.domains == domain) & (pool.test == test)).nonzero().flatten().tolist()
        for row in rows[:count]:
            inside = folder / split / source.class_names[int(pool.labels[row])]
            inside.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pool.images[row].permute(1, 2, 0).numpy()).save(inside / f"{row}.png")


@pytest.mark.slow
def test_two_sites_train_over_tls_and_a_stranger_does_not(
    networks: None, started: dict[str, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FLWR_HOME": str(tmp_path / "flwr")}
    environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "FLWR_TELEMETRY_ENABLED": "0"}

    def start(name: str, where: str, *command: str) -> None:
        with (tmp_path / f"{name}.log").open("wb") as log:
            started[name] = subprocess.Popen(
                ["ip", "netns", "exec", f"fed-{where}", *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def said(name: str) -> str:
        return (tmp_path / f"{name}.log").read_text(errors="replace")

    def wait_for(name: str, words: str, seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while words not in said(name) and time.monotonic() < until:
            time.sleep(1)
        assert words in said(name), said(name)[-2000:]

    hosts = [option for net in SITES.values() for option in ("--host", f"{net}.1")]
    assert main(["deploy", "keys", str(tmp_path / "keys"), *hosts, *SITES]) == 0
    assert main(["deploy", "keys", str(tmp_path / "others"), *hosts, "north"]) == 0
    classes = ", ".join(DigitDomains().class_names)
    arguments = f"{{sites: [north, south], classes: [{classes}], most: 90, size: 32}}"
    sites = f"{{class_path: datamodules.Sites, init_args: {arguments}}}"
    options = (f"--data.source={sites}", "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2")
    config = "configs/pfedpg_digits.yaml"
    assert main(["deploy", "app", config, str(tmp_path / "app"), *options, "--trainer.num_sanity_val_steps=0"]) == 0
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(connection(f"127.0.0.1:{PORT}", tmp_path / "keys" / "ca.pem"))

    benchmark, flwr = str(BIN / "benchmark"), str(BIN / "flwr")
    keys = ("--keys", str(tmp_path / "keys"))
    start("server", "hub", benchmark, "deploy", "server", "--host", "0.0.0.0", "--port", str(PORT), *keys)
    wait_for("server", "Uvicorn running")
    for site in SITES:
        start(
            f"register {site}",
            "hub",
            flwr,
            "supernode",
            "register",
            str(tmp_path / "keys" / f"{site}.pub"),
            "federation",
        )
        wait_for(f"register {site}", "registered successfully")

    def site_command(site: str, key: str, root: str = "keys") -> list[str]:
        folder, server = tmp_path / site, f"{SITES[site]}.1:{PORT}"
        given = ("--root", str(tmp_path / root / "ca.pem"), "--key", str(tmp_path / key), "--server", server)
        own = ("--data", str(folder), "--state", str(tmp_path / f"{site}-state"), "--app", str(tmp_path / "app"))
        return [benchmark, "deploy", "client", "--name", site, *given, *own]

    for number, site in enumerate(SITES):
        write_images(tmp_path / site, number)
    start("stranger", "north", *site_command("north", "others/north.key"), "--port", "9099")
    start("deceived", "north", *site_command("north", "keys/north.key", root="others"), "--port", "9098")
    for site in SITES:
        start(site, site, *site_command(site, f"keys/{site}.key"))
        wait_for(site, "SuperNode ID")
    run_config = f'state="{tmp_path / "hub"}" run="first"'
    start("run", "hub", flwr, "run", str(tmp_path / "app"), "federation", "--stream", "--run-config", run_config)
    wait_for("run", "written: ", 900)

    made = tmp_path / "hub" / "first" / "server"
    assert verify_record(made) == []
    record = read_record(made)
    assert (record.setting, record.test_sizes) == ("the sites' own images", (40, 40))
    assert record.deployed is not None
    assert record.deployed["refused"] == []
    assert record.summary["server"]["test"]["accuracy"]["last"]["average"] > 0.3
    for number, site in enumerate(SITES):
        own = tmp_path / f"{site}-state" / "first"
        assert {path.name for path in own.glob("client*.safetensors")} >= {f"client{number}.safetensors"}
        image = next((tmp_path / site / "test").rglob("*.png"))
        assert main(["predict", str(own / f"client{number}"), str(image)]) == 0
    # Neither a key that nobody registered, nor a server of another root, is spoken with.
    assert "SuperNode ID" not in said("stranger")
    assert "SuperNode ID" not in said("deceived")
