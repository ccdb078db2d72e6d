"""Bytes of the messages of every method, beside the numbers that records count."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tabulate import tabulate

import methods
from benchmark.config.yaml_files import read_mapping
from benchmark.deploy.agreement import Agreement
from benchmark.deploy.in_process import FIRST, InProcess
from benchmark.deploy.server import LiveServer
from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, write_json, write_text
from benchmark.records.environment import environment
from benchmark.shipped import configurations

TITLE = "Messages of the second round, per client"
CLIENTS = 2
COLUMNS = (
    *("method", "numbers down", "numbers up", "as float32, down", "as float32, up", "bytes down", "bytes up"),
    *("ratio down", "ratio up", "refused"),
)


@dataclass(frozen=True)
class Sizes:
    """Of the messages of one method, means over the clients of a round.

    Attributes:
        method: the name of its configuration.
        suite: on which data.
        numbers_down: that the record counts from server to client.
        numbers_up: likewise from client to server.
        counted_down: bytes of these numbers, as the record counts them.
        counted_up: likewise.
        bytes_down: of the messages as Flower sends them.
        bytes_up: likewise.
        refused: why it cannot be deployed; nothing is counted then.
    """

    method: str
    suite: str
    numbers_down: float = 0.0
    numbers_up: float = 0.0
    counted_down: float = 0.0
    counted_up: float = 0.0
    bytes_down: float = 0.0
    bytes_up: float = 0.0
    refused: str = ""


def all_methods() -> list[str]:
    """Return the names of the methods' configurations that come with the code."""
    return [name.removeprefix("methods/") for name in configurations() if name.startswith("methods/")]


def suite_of(method: str) -> str:
    """Return the demo on which a method runs: images alone, or images and names of classes."""
    model = read_mapping(f"configs/methods/{method}.yaml")["model"]
    path = model if isinstance(model, str) else model["class_path"]
    kind = getattr(methods, path.rsplit(".", 1)[-1])
    return "digits_clip" if hasattr(kind, "clip_class") else "digits"


def sizes_of(method: str) -> Sizes:
    """Run two rounds of a method with two clients each, in this process, and measure the messages of the second.

    The first may be another: a rule may have nothing to send yet.

    Args:
        method: the name of a file in ``configs/methods``.
    """
    suite = suite_of(method)
    files = [f"--config=configs/{name}.yaml" for name in (f"methods/{method}", f"suites/{suite}")]
    few = [f"--data.clients_per_round={CLIENTS}", "--data.cache_features=false", "--trainer.max_epochs=2"]
    try:
        agreement = Agreement.of([*files, *few])
        with tempfile.TemporaryDirectory() as folder:
            wire = InProcess(agreement, Path(folder))
            server = LiveServer(agreement, wire, 600.0, "run")
            wire.nodes = [FIRST + client for client in sorted({*server.rule.select(1), *server.rule.select(2)})]
            server.meet()
            server.round(1)
            before = len(wire.carried)
            server.round(2)
    except ConfigurationError as error:
        return Sizes(method, suite, refused=str(error))
    if server.refused:
        raise ConfigurationError(f"{method}: {server.refused[0]}")
    _, *counted = server.traffic.rounds[-1]
    sent = wire.carried[before:]
    totals = (*counted, sum(each.down for each in sent), sum(each.up for each in sent))
    counted_down, counted_up, numbers_down, numbers_up, down, up = (total / CLIENTS for total in totals)
    return Sizes(method, suite, numbers_down, numbers_up, counted_down, counted_up, down, up)


def measured(names: Sequence[str]) -> Iterator[Sizes]:
    """Measure one method after the other."""
    logging.getLogger("benchmark.deploy").setLevel(logging.WARNING)
    for name in names:
        yield sizes_of(name)


def write_table(rows: Sequence[Sizes], folder: Path) -> Path:
    """Write ``messages.md``, and with the hardware ``messages.json``; return the former's path."""
    make_folder(folder)
    body = tabulate([_cells(row) for row in rows], list(COLUMNS), tablefmt="pipe", disable_numparse=True)
    write_text(folder / "messages.md", f"# {TITLE}\n\n{body}\n")
    write_json(folder / "messages.json", {"title": TITLE, "rows": [asdict(row) for row in rows], **environment()})
    return folder / "messages.md"


def _cells(row: Sizes) -> tuple[str, ...]:
    if row.refused:
        return (row.method, *[""] * (len(COLUMNS) - 2), row.refused)
    counts = (row.numbers_down, row.numbers_up, row.counted_down, row.counted_up, row.bytes_down, row.bytes_up)
    ratios = (_ratio(row.bytes_down, row.counted_down), _ratio(row.bytes_up, row.counted_up))
    return (row.method, *(f"{count:,.0f}" for count in counts), *ratios, "")


def _ratio(sent: float, counted: float) -> str:
    return f"{sent / counted:.3f}" if counted else ""
