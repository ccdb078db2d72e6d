"""A deployment whose machines are all this one: Flower's server and a client's node for each client, as processes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.deploy.agreement import Agreement
from benchmark.deploy.app import write_app
from benchmark.deploy.machines import client_command, connection, installed, server_command
from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, write_text
from benchmark.records.record_file import is_finished
from benchmark.signals import end_with_parent, termination_as_interrupt
from datamodules.split_record import SplitRecord

LOOPBACK = "127.0.0.1"
#: What our server's log lines begin with, among Flower's own.
OURS = ("round ", "refused: ")
#: Seconds until a server listens, and until processes that were asked to end are killed.
START, GRACE = 60.0, 10.0


@dataclass
class LocalDeployment:
    """Processes of Flower on this machine, on the loopback interface.

    Attributes:
        agreement: of the deployment.
        split: which images are whose.
        folder: of the run: ``server``, the clients' own files, the app, and the processes' logs.
    """

    agreement: Agreement
    split: SplitRecord
    folder: Path
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)

    def run(self) -> Path:
        """Run it, or what is left of it, and return the server's folder.

        Raises:
            ConfigurationError: a process has ended before it should.
        """
        self._prepare()
        with termination_as_interrupt(signal.SIGINT):
            try:
                server = _free_port()
                self._start("superlink", server_command(LOOPBACK, server, None))
                self._wait_for(server)
                for number in self.agreement.terms.training_clients:
                    name, state = self.agreement.client_names[number], {"state": str(self.folder.parent)}
                    command = client_command(name, f"{LOOPBACK}:{server}", None, state, _free_port())
                    self._start(f"client{number}", command)
                print(f"{len(self._running) - 1} clients are starting; logs: {self.folder / 'logs'}", flush=True)
                self._submit(server)
            finally:
                self._end()
        made = self.folder / "server"
        if not is_finished(made):
            raise ConfigurationError(
                f"the deployment has ended without a record; see {self.folder / 'logs'}, and give the command again to "
                "go on"
            )
        return made

    def _prepare(self) -> None:
        """Write app, split and Flower's configuration, unless an earlier command has.

        Raises:
            ConfigurationError: the folder is of another deployment, or of one that is finished.
        """
        app, told = self.folder / "app", self.folder / "agreement.sha256"
        if is_finished(self.folder / "server"):
            raise ConfigurationError(f"{self.folder} holds a finished deployment; give another folder")
        if self.folder.exists():
            if not told.is_file() or told.read_text() != self.agreement.digest:
                raise ConfigurationError(f"{self.folder} is there, and not of this deployment; give another folder")
        else:
            make_folder(self.folder.parent)
            around = Path(tempfile.mkdtemp(prefix=f".{self.folder.name}.", dir=self.folder.parent))
            building = make_folder(around / "new")  # with the rights of other folders
            write_app(self.agreement, building / app.name)
            self.split.write(building / "split.json")
            write_text(building / told.name, self.agreement.digest)
            building.rename(self.folder)  # whole or not at all: a command that was killed is given again
            around.rmdir()
        make_folder(self.folder / "logs")

    def _submit(self, server: int) -> None:
        """Run the app and print what the server says of its rounds."""
        write_text(make_folder(self.folder / "flower") / "config.toml", connection(f"{LOOPBACK}:{server}", None))
        config = f'state="{self.folder.parent}" run="{self.folder.name}" split="{self.folder / "split.json"}"'
        command = [installed("flwr"), "run", str(self.folder / "app"), "federation", "--stream", "--run-config", config]
        with (self.folder / "logs" / "run.txt").open("ab") as log:
            process = self._start("run", command, out=subprocess.PIPE)
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                said = line.decode(errors="replace").strip()
                if said.startswith(OURS):
                    print(said, flush=True)
                if is_finished(self.folder / "server"):
                    break

    # ------------------------------------------------------------------ processes

    def _start(self, name: str, command: Sequence[str], out: int | None = None) -> subprocess.Popen[bytes]:
        with (self.folder / "logs" / f"{name}.txt").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log if out is None else out,
                stderr=subprocess.STDOUT,
                env=self._environment,
                preexec_fn=end_with_parent,
                start_new_session=True,
            )
        self._running[name] = process
        return process

    @property
    def _environment(self) -> dict[str, str]:
        """Return that of Flower's processes: its files lie in the run's folder, and it tells nobody of them."""
        found = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        found |= {"FLWR_HOME": str(self.folder / "flower"), "FLWR_TELEMETRY_ENABLED": "0"}
        return found | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}

    def _wait_for(self, port: int) -> None:
        """Wait until the server listens.

        Raises:
            ConfigurationError: it does not.
        """
        until = time.monotonic() + START
        while time.monotonic() < until and self._running["superlink"].poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1.0):
                return
            time.sleep(0.2)
        raise ConfigurationError(f"Flower's server has not started; see {self.folder / 'logs' / 'superlink.txt'}")

    def _end(self) -> None:
        """End all processes and theirs: ask, wait a while, then kill."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + GRACE
            for process in self._running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))


def _free_port() -> int:
    with socket.socket() as made:
        made.bind((LOOPBACK, 0))
        return int(made.getsockname()[1])
