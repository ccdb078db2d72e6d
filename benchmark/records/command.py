"""``benchmark show``: its options, and what it prints of a finished run."""

import argparse
from typing import Any

from benchmark.errors import printable
from benchmark.paths import user_path


def show(arguments: argparse.Namespace) -> int:
    """Print a record's summary, or of its kept images intervals, calibration, a decision curve or subgroups."""
    if arguments.calibration:
        from benchmark.records.calibration import print_calibration

        print_calibration(arguments.run_dir)
        return 0
    if arguments.net_benefit is not None:
        from benchmark.records.decision_curves import print_net_benefit

        print_net_benefit(arguments.run_dir, arguments.net_benefit)
        return 0
    if arguments.youden is not None:
        from benchmark.records.operating_points import print_youden

        print_youden(arguments.run_dir, arguments.youden)
        return 0
    if arguments.subgroups is not None:
        from benchmark.records.group_fairness import print_subgroups

        print_subgroups(arguments.run_dir, arguments.subgroups)
        return 0
    if arguments.intervals is not None:
        from benchmark.records.run_intervals import print_intervals

        print_intervals(arguments.run_dir, arguments.intervals)
        return 0
    from benchmark.records.record_file import read_record

    record = read_record(arguments.run_dir)  # before more is imported: there may be none
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from benchmark.metrics import STATISTICS
    from benchmark.records.averaged_classes import classes_of_means
    from benchmark.records.stored_run import stored_run
    from benchmark.records.words import ROUND_WORDS, metric_number, metric_words, unit_of

    console = Console(highlight=False, markup=False)
    tuned, trials = "", record.tuning
    if trials:
        tuned = f"values chosen among {trials['trials']} trials on {trials['chosen_on']}"
    server = f" with {record.other_server}" if record.other_server else ""
    clients = f"{len(record.client_names)} clients"
    run = f"{record.method}{server} on {record.dataset} ({record.setting}), seed {record.seed}, {clients}"
    console.print(_text(run))
    device = _text(record.device)
    console.print(
        f"rounds {record.rounds_trained} of {record.rounds}, {record.seconds['total']:.1f} s on {device}, "
        f"{record.communication['up_bytes']:.0f} bytes up and {record.communication['down_bytes']:.0f} down "
        "per participating client and round"
    )
    deployed = ""
    if record.deployed is not None:
        up, down = (record.deployed[name] for name in ("up_bytes", "down_bytes"))
        deployed = f"deployed: {up:,} bytes of messages up and {down:,} down, {len(record.deployed['refused'])} refused"
        deployed += ", uploads summed unseen" if "secure_aggregation" in record.deployed else ""
    for said in filter(None, (tuned, record.corrected, deployed)):
        console.print(_text(said))
    entries = _entries(record.summary)
    there = {name for *_, entry in entries for name in entry["last"]}
    statistics = [each for each in STATISTICS.values() if each.always or each.name in there]
    shown = Table("", *(each.words.replace(" ", "\n") for each in statistics))
    for point, split, metric, entry in entries:
        of = f", {entry['clients']} of {clients}" if entry["clients"] < len(record.client_names) else ""
        shown.add_row(Text(_text(metric_words(split, metric, point) + unit_of(metric) + of), style="bold"))
        for which, words in ROUND_WORDS.items():
            if which not in entry:
                continue
            values = entry[which]
            label = words.replace("round", f"round ({values['round']})") if "round" in values else words
            numbers = [
                "" if values.get(each.name) is None else metric_number(values[each.name], metric) for each in statistics
            ]
            shown.add_row(*map(Text, (f"  {label}", *numbers)))
        shown.add_section()
    console.print(shown)
    for line in classes_of_means(stored_run(arguments.run_dir)):
        console.print(Text(_text(line)))
    return 0


def _text(said: str) -> str:
    """Return what a file said, without characters that would steer a terminal."""
    return printable(said, kept="\n")


def _entries(summary: dict[str, Any]) -> list[tuple[str, str, str, dict[str, Any]]]:
    """List what was measured: test accuracy first, then other splits, then other metrics."""
    from benchmark.metrics import METRICS
    from benchmark.records.record import POINTS

    order = {metric: number for number, metric in enumerate(METRICS)}
    found = [
        (point, split, metric, entry)
        for point, splits in summary.items()
        for split, metrics in splits.items()
        for metric, entry in metrics.items()
    ]

    def place(entry: tuple[str, str, str, dict[str, Any]]) -> tuple[bool, int, bool, str, int]:
        point, split, metric, _ = entry
        return split == "train", order.get(metric, len(order)), split != "test", split, POINTS.index(point)

    return sorted(found, key=place)


def add_command(commands: Any) -> None:
    """Add the command to those of ``benchmark``."""
    entry = commands.add_parser("show", help=show.__doc__, description=show.__doc__)
    entry.add_argument("run_dir", type=user_path)
    instead = entry.add_mutually_exclusive_group()
    instead.add_argument(
        "--intervals",
        metavar="METRIC",
        help="print this metric of the last evaluation with its 95 %% intervals instead",
    )
    instead.add_argument(
        "--calibration",
        action="store_true",
        help="print calibration on test images before and after a temperature that is fitted on val images instead",
    )
    instead.add_argument(
        "--net_benefit",
        metavar="CLASS",
        help="print the net benefit of acting on this class, by threshold of its probability, instead",
    )
    instead.add_argument(
        "--subgroups",
        metavar="COLUMN",
        help="print metrics of test images by the values of this column of their index, such as sex, instead",
    )
    instead.add_argument(
        "--youden",
        metavar="CLASS",
        help="print rates of test images by a threshold of this class, of two, that is chosen on val images instead",
    )
    entry.set_defaults(run=show)
