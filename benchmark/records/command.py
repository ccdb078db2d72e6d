"""``benchmark show`` and ``benchmark compare``: their options, and what they print of finished runs."""

import argparse
from typing import Any

from benchmark.paths import user_path
from benchmark.records.words import POINT_WORDS


def show(arguments: argparse.Namespace) -> int:
    """Print a record's summary, or of its stored predictions intervals, calibration, a decision curve or subgroups."""
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


def compare(arguments: argparse.Namespace) -> int:
    """Compare two finished runs on the same images, image by image: differences, their intervals and tests."""
    from benchmark.records.printed_comparison import print_comparison

    points = arguments.point, arguments.point_b or arguments.point
    print_comparison((arguments.a, arguments.b), arguments.metric, points, arguments.split, arguments.of_class)
    return 0


def add_commands(commands: Any) -> None:
    """Add the commands to those of ``benchmark``."""
    entry = commands.add_parser("show", help=show.__doc__, description=show.__doc__)
    entry.add_argument("run_dir", type=user_path)
    instead = entry.add_mutually_exclusive_group()
    instead.add_argument("--metric", help="print this metric alone, by rounds, in place of the whole summary")
    instead.add_argument(
        "--intervals",
        metavar="METRIC",
        nargs="?",
        const="",
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
    entry = commands.add_parser("compare", help=compare.__doc__, description=compare.__doc__)
    entry.add_argument("a", type=user_path, metavar="RUN_DIR", help="A: a finished run that stored its predictions")
    entry.add_argument("b", type=user_path, metavar="RUN_DIR", help="B: likewise; differences are B - A")
    entry.add_argument(
        "--metric",
        nargs="+",
        default=[],
        help="default: accuracy, and of runs with clinical metrics balanced_accuracy and auroc",
    )
    entry.add_argument("--split", default="test", help="of the images; default %(default)s")
    entry.add_argument(
        "--point",
        choices=tuple(POINT_WORDS),
        default="server",
        help="of a round: after aggregation (server) or after local training (local); default %(default)s",
    )
    entry.add_argument("--point_b", choices=tuple(POINT_WORDS), help="the point of B; default that of A")
    entry.add_argument(
        "--class", dest="of_class", metavar="CLASS", help="compare the AUROC of this class too, with DeLong's test"
    )
    entry.set_defaults(run=compare)
