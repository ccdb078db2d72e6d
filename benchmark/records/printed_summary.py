"""A record's summary as ``benchmark show`` prints it."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError, listed, printable
from benchmark.metrics import EVALUATED, METRICS, STATISTICS, Statistic
from benchmark.records.averaged_classes import classes_of_means
from benchmark.records.record import POINTS, RunRecord
from benchmark.records.record_file import read_record
from benchmark.records.stored_run import stored_run
from benchmark.records.words import ROUND_WORDS, metric_number, metric_words, place_words, unit_of

if TYPE_CHECKING:  # slow to import
    from rich.table import Table

#: Point, split, metric and the summary's entry of one thing that was measured.
Entry = tuple[str, str, str, dict[str, Any]]


def print_summary(run_dir: Path, metric: str | None = None) -> None:
    """Print who ran what, accuracy by rounds, and other metrics of the last; or one metric by rounds.

    Held-out training images (``val``) have other metrics only where nothing else was scored, or on request.

    Raises:
        ConfigurationError: there is no record, or it has no such metric.
    """
    record = read_record(run_dir)  # before more is imported: there may be none
    entries = _entries(record.summary)
    measured = list(dict.fromkeys(name for _, _, name, _ in entries))
    if metric is not None and metric not in measured:
        raise ConfigurationError(f"{run_dir}: the run has no metric {metric!r:.80}; it has {', '.join(measured)}")
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    if metric is None:
        for line in _facts(record):
            console.print(Text(_text(line)))
    scored = {split for _, split, _, _ in entries} - {"train"}
    left_out = "val" if scored != {"val"} else ""
    by_rounds = [each for each in entries if each[2] == (metric or EVALUATED) and (metric or each[1] != "train")]
    others = [] if metric else [each for each in entries if each not in by_rounds and each[1] != left_out]
    console.print(_table(by_rounds, others, record))
    if metric is None:
        for line in classes_of_means(stored_run(run_dir)):
            console.print(Text(_text(line)))
    if others:
        command = shlex.join(["benchmark", "show", str(run_dir), "--metric", others[0][2]])
        console.print(Text(_text(f"One metric by rounds and splits: {command}")), soft_wrap=True)


def _facts(record: RunRecord) -> Iterator[str]:
    """Say who ran what, for how long, and what was sent."""
    clients = f"{len(record.client_names)} clients"
    server = f" with {record.other_server}" if record.other_server else ""
    yield f"{record.method}{server} on {record.dataset} ({record.setting}), seed {record.seed}, {clients}"
    yield (
        f"rounds {record.rounds_trained} of {record.rounds}, {record.seconds['total']:.1f} s on {record.device}, "
        f"{record.communication['up_bytes']:.0f} bytes up and {record.communication['down_bytes']:.0f} down "
        "per participating client and round"
    )
    if record.tuning:
        yield f"values chosen among {record.tuning['trials']} trials on {record.tuning['chosen_on']}"
    if record.corrected:
        yield record.corrected
    never = [record.client_names[client] for client, trained in enumerate(record.trained or ()) if trained is False]
    if never:
        yield f"never trained, so that what is their own is as at the start: {listed(never)}"
    if void := len((record.facts or {}).get("void", {})):
        yield f"void, so that the server's values stayed as they were: {void} of {record.rounds_trained} rounds"
    if record.deployed is not None:
        up, down = (record.deployed[name] for name in ("up_bytes", "down_bytes"))
        deployed = f"deployed: {up:,} bytes of messages up and {down:,} down, {len(record.deployed['refused'])} refused"
        yield deployed + (", uploads summed unseen" if "secure_aggregation" in record.deployed else "")


def _table(by_rounds: list[Entry], others: list[Entry], record: RunRecord) -> "Table":
    """Make the table: of some entries a row for each kind of round, of others one for the last, by split and point."""
    from rich.table import Table
    from rich.text import Text

    there = {name for *_, entry in (*by_rounds, *others) for name in entry["last"]}
    statistics = [each for each in STATISTICS.values() if each.always or each.name in there]
    table = Table("", *(each.words.replace(" ", "\n") for each in statistics))
    for entry in by_rounds:
        table.add_row(Text(_heading(entry, record), style="bold"))
        for which, words in ROUND_WORDS.items():
            if which in entry[3]:
                values = entry[3][which]
                label = words.replace("round", f"round ({values['round']})") if "round" in values else words
                table.add_row(*map(Text, (f"  {label}", *_numbers(values, entry[2], statistics))))
        table.add_section()
    for split, point in dict.fromkeys((split, point) for point, split, _, _ in others):
        alike = [each for each in others if each[:2] == (point, split)]
        last = alike[0][3]["last"].get("round", record.rounds_trained)
        table.add_row(Text(_text(f"{place_words(split, point)}, last round ({last})"), style="bold"))
        for entry in alike:
            name = f"  {entry[2].replace('_', ' ')}{unit_of(entry[2])}{_of_clients(entry, record)}"
            table.add_row(*map(Text, (_text(name), *_numbers(entry[3]["last"], entry[2], statistics))))
        table.add_section()
    return table


def _heading(entry: Entry, record: RunRecord) -> str:
    """Say what was measured, where, in which unit, and of how many clients."""
    point, split, metric, _ = entry
    return _text(metric_words(split, metric, point) + unit_of(metric) + _of_clients(entry, record))


def _of_clients(entry: Entry, record: RunRecord) -> str:
    """Say how many clients have a value, if not all have."""
    clients = len(record.client_names)
    return f", {entry[3]['clients']} of {clients} clients" if entry[3]["clients"] < clients else ""


def _numbers(values: dict[str, Any], metric: str, statistics: list[Statistic]) -> list[str]:
    """Write the statistics; nothing where one is not defined, or nobody knows which clients are worst."""
    shown = [each.name for each in statistics if metric in METRICS or not each.name.startswith("worst")]
    known = {name: metric_number(values[name], metric) for name in shown if values.get(name) is not None}
    return [known.get(each.name, "") for each in statistics]


def _text(said: str) -> str:
    """Return what a file said, without characters that would steer a terminal."""
    return printable(said, kept="\n")


def _entries(summary: dict[str, Any]) -> list[Entry]:
    """List what was measured: test accuracy first, then other splits, then other metrics."""
    order = {metric: number for number, metric in enumerate(METRICS)}
    found = [
        (point, split, metric, entry)
        for point, splits in summary.items()
        for split, metrics in splits.items()
        for metric, entry in metrics.items()
    ]

    def place(entry: Entry) -> tuple[bool, int, bool, str, int]:
        point, split, metric, _ = entry
        return split == "train", order.get(metric, len(order)), split != "test", split, POINTS.index(point)

    return sorted(found, key=place)
