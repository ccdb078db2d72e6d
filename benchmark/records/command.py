"""``benchmark show``: its options, and what it prints of a finished run."""

import argparse
from typing import Any

from benchmark.paths import user_path


def show(arguments: argparse.Namespace) -> int:
    """Print a record's summary, or of its kept images intervals, calibration, a decision curve or subgroups."""
    if arguments.calibration:
        from benchmark.records.calibration import print_calibration

        print_calibration(arguments.run_dir)
    elif arguments.net_benefit is not None:
        from benchmark.records.decision_curves import print_net_benefit

        print_net_benefit(arguments.run_dir, arguments.net_benefit)
    elif arguments.youden is not None:
        from benchmark.records.operating_points import print_youden

        print_youden(arguments.run_dir, arguments.youden)
    elif arguments.subgroups is not None:
        from benchmark.records.group_fairness import print_subgroups

        print_subgroups(arguments.run_dir, arguments.subgroups)
    elif arguments.intervals is not None:
        from benchmark.records.run_intervals import print_intervals

        print_intervals(arguments.run_dir, arguments.intervals)
    else:
        from benchmark.records.printed_summary import print_summary

        print_summary(arguments.run_dir, arguments.metric)
    return 0


def add_command(commands: Any) -> None:
    """Add the command to those of ``benchmark``."""
    entry = commands.add_parser("show", help=show.__doc__, description=show.__doc__)
    entry.add_argument("run_dir", type=user_path)
    instead = entry.add_mutually_exclusive_group()
    instead.add_argument("--metric", help="print this metric alone, by rounds, in place of the whole summary")
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
