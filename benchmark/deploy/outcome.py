"""Keep a deployment's server after each round, and write the directory of its run."""

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmark.deploy.agreement import LARGEST_CHANGE, LEVELS, Agreement
from benchmark.deploy.messages import packed
from benchmark.deploy.server import LiveServer
from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, parse_json, read_regular, reason, write_bytes, write_text
from benchmark.locks import FileLock
from benchmark.own_metrics import own_facts, paths_of
from benchmark.paths import user_path
from benchmark.records.environment import environment
from benchmark.records.hashes import OF_THE_IMAGES, manifest_hash
from benchmark.records.record import RunRecord
from benchmark.records.record_file import write_record
from benchmark.records.source_code import code_of
from benchmark.run.recorder import chain, peak_memory
from benchmark.run.scores import Scores, long_table, print_scores
from datamodules.manifest import MOST_BYTES

STATE, LOCK = "state.pt", "server.lock"
#: Bytes of a state that are read.
MOST = 2**36


@dataclass(frozen=True)
class RunFolder:
    """The folder of a deployment's server.

    Attributes:
        folder: of it.
        split: JSON of which images are whose, where all sites' data were divided up from one data set; None where
            nobody but the sites knows.
    """

    folder: Path
    split: dict[str, Any] | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let no other server write here meanwhile.

        Raises:
            ConfigurationError: one does.
        """
        lock = FileLock(make_folder(self.folder) / LOCK)
        lock.take(lambda who: f"another server of this deployment writes to {self.folder} ({who}); wait for it to end")
        try:
            yield
        finally:
            lock.release()

    def take_up(self, server: LiveServer) -> None:
        """Have a server go on from what another one of the same name has kept.

        Raises:
            ConfigurationError: it is of another deployment, or damaged.
        """
        path = make_folder(self.folder) / STATE
        try:
            content = read_regular(path, MOST)
            server.go_on(torch.load(io.BytesIO(content), weights_only=True))
        except FileNotFoundError:
            return
        except ConfigurationError:
            raise
        except Exception as error:  # whatever torch raises of a file of others
            raise ConfigurationError(f"{path} is no state that a server has stored ({type(error).__name__})") from error

    def keep(self, server: LiveServer) -> None:
        """Keep what the server has, so that another one can go on."""
        torch.save(server.state(), content := io.BytesIO())
        write_bytes(self.folder / STATE, content.getvalue())

    def write(self, server: LiveServer) -> None:
        """Write the shared values, and the record of a run with the files it is about; print the last scores.

        Raises:
            ConfigurationError: no client has ever scored itself, so that there is nothing to record.
        """
        agreement, folder = server.agreement, make_folder(self.folder)
        write_bytes(folder / "shared.safetensors", packed(server.shared))
        config = agreement.config
        write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
        split = self.split or _sizes_alone(server)
        write_text(folder / "manifest.json", json.dumps(split) + "\n")
        found = _values(server)
        if all(split == "train" for _, _, split, _ in found):
            raise ConfigurationError(
                f"no client has scored itself, so that {folder} has no record; the shared values are in "
                "shared.safetensors, and the log says which scores were refused"
            )
        write_record(folder, self._record(server, split), long_table(found))
        last = max(round for round, *_ in found)
        print_scores({key: values for key, values in found.items() if key[0] == last}, [*agreement.client_names])

    def _record(self, server: LiveServer, split: dict[str, Any]) -> RunRecord:
        agreement, method, seconds = server.agreement, server.method, server.seconds
        metrics = agreement.config["data"].get("metrics")
        parts = (method, *server.rule.modules())
        return RunRecord(
            method=type(method).__name__,
            dataset=agreement.dataset,
            setting=agreement.setting if self.split else "the sites' own images",
            seed=agreement.terms.seed,
            client_names=agreement.client_names,
            test_sizes=tuple(_test_sizes(server)),
            manifest_hash=manifest_hash(split),
            device="cpu" if method.device.type == "cpu" else torch.cuda.get_device_name(method.device),
            environment=environment(),
            rounds=agreement.terms.rounds,
            rounds_trained=server.finished,
            communication=server.traffic.per_client(),
            seconds={**seconds, "total": sum(seconds.values())},
            peak_memory_bytes=peak_memory(method.device),
            server=chain(server.rule),
            default_server=chain(method.make_server()),
            code=code_of(parts, [agreement.config, *paths_of(metrics)]),
            images_sha256=split.get(OF_THE_IMAGES),
            facts={name: {str(n): value for n, value in of.items()} for name, of in server.facts.items()} or None,
            privacy=server.rule.guarantee(),
            own_metrics=own_facts(metrics),
            deployed={
                "down_bytes": server.bytes_down,
                "up_bytes": server.bytes_up,
                "refused": server.refused,
                **_rounding(server.agreement),
            },
        )


def read_split(given: object, client_names: Sequence[str]) -> dict[str, Any] | None:
    """Return the record of which images are whose, of a file that the server's machine has; None where none is named.

    Args:
        given: path of a run's ``manifest.json``.
        client_names: of the deployment.

    Raises:
        ConfigurationError: it cannot be read, or is none.
    """
    if not isinstance(given, str) or not given:
        return None
    path = user_path(given)
    try:
        found = parse_json(read_regular(path, MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"split: {path} is no manifest.json of a partition ({reason(error)})") from error
    clients = found.get("clients") if isinstance(found, dict) else None
    listed = clients if isinstance(clients, list) else []
    names = [client.get("name") if isinstance(client, dict) else None for client in listed]
    if names != [*client_names]:
        raise ConfigurationError(f"split: {path} is no manifest.json of a partition over these clients")
    return dict(found)


def _rounding(agreement: Agreement) -> dict[str, Any]:
    """Return how finely uploads are summed; nothing where the server sees each by itself."""
    finely = {"largest_change": LARGEST_CHANGE, "levels": LEVELS}
    return {"secure_aggregation": finely} if agreement.secure_aggregation else {}


def _test_sizes(server: LiveServer) -> list[int]:
    clients = range(len(server.agreement.client_names))
    return [server.held_out.get(client, {}).get("test", 0) for client in clients]


def _sizes_alone(server: LiveServer) -> dict[str, Any]:
    """Return what the server knows of who holds what: how many images."""
    tests = _test_sizes(server)
    clients = [
        {"name": name, "train_size": server.sizes.get(client, 0), "test_size": tests[client]}
        for client, name in enumerate(server.agreement.client_names)
    ]
    return {"format": 1, "algorithm": "own images of each site", "clients": clients}


def _values(server: LiveServer) -> Scores:
    """Return per round, point, split and metric one value per client, NaN of those who have sent none then."""
    found: Scores = {}
    for round, client, point, split, metric, value in server.metrics:
        nothing = torch.full((len(server.agreement.client_names),), float("nan"), dtype=torch.float64)
        found.setdefault((round, point, split, metric), nothing)[client] = value
    return found
