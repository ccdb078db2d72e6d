"""The command benchmark: tables, and what has been recorded. Training itself is lightning-cli."""

import argparse
import contextlib
import io
import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from benchmark.boards import command as boards
from benchmark.cells.places import add_place, chosen_place
from benchmark.command_parser import CommandParser, without_command
from benchmark.config.class_names import Named, check_names, names_in_files
from benchmark.deploy import command as deploy
from benchmark.errors import ConfigurationError, printable
from benchmark.figures.pfedpt import check_figure
from benchmark.paths import check_present_folder, user_path
from benchmark.predict.command import add_commands
from benchmark.ranks.process_numbers import check_numbers
from benchmark.records import command as records
from benchmark.run.terminal import outliving_readers
from benchmark.shipped import configuration, configurations, version
from benchmark.tables.layout import check_classes

if TYPE_CHECKING:  # slow to import
    from benchmark.tables.run_table import TableResult

KEPT_RUNS = Path("results/runs")


def table(arguments: argparse.Namespace) -> int:
    """Run a table's missing runs and write it."""
    check_classes(arguments.name, arguments.preset)
    from benchmark.tables.print_cell import cell_configuration
    from benchmark.tables.run_table import run_table

    if arguments.by_seed and arguments.baseline is None:
        raise ConfigurationError("--by_seed compares rows with a baseline: give it with --baseline ROW")
    if arguments.print_config:
        row, data = arguments.print_config
        seeds = arguments.seeds or [None]
        if len(seeds) > 1:
            raise ConfigurationError(
                f"--print_config prints one run, and --seeds gives {' '.join(map(str, seeds))}; give one seed"
            )
        print(cell_configuration(arguments.name, arguments.preset, row, data, _data_dir(arguments), *seeds), end="")
        return 0
    result = run_table(
        arguments.name,
        arguments.preset,
        _data_dir(arguments),
        arguments.jobs,
        seeds=arguments.seeds,
        kept=arguments.kept,
        baseline=arguments.baseline,
        place=chosen_place(arguments),
        rerun_changed=arguments.rerun_changed,
        seed_by_seed=arguments.by_seed,
    )
    return _print_table(result)


def _print_table(result: "TableResult") -> int:
    """Print a table and what failed; the exit status."""
    print(result.text)
    if result.by_seed:
        print(result.by_seed)
    texts = ", ".join(map(str, (result.markdown, result.csv, result.latex)))
    picture = f", {result.picture}" if result.picture else ""
    if result.unchanged:
        print(f"as before, and left as they are: {texts}{picture}")
        print("  (seconds, memory, hardware and revision aside; for those of these runs, remove the files first)")
    else:
        print(f"written: {texts}{picture}")
    for name, outcome in result.failed.items():
        log = f" (log: {outcome.log})" if outcome.log else ""
        print(_text(f"failed: {name}: {outcome.error}{log}"), file=sys.stderr)
    for problem in result.problems:
        print(_text(f"failed: {problem}"), file=sys.stderr)
    return 1 if result.failed or result.problems else 0


def tune(arguments: argparse.Namespace) -> int:
    """Tune every row of a table with the same number of trials on held-out training images, and test it tuned."""
    check_classes(arguments.name, arguments.preset)
    from benchmark.tuning.tune import tune_table

    result = tune_table(
        arguments.name,
        arguments.preset,
        arguments.trials,
        arguments.rounds,
        arguments.val_fraction,
        _data_dir(arguments),
        arguments.jobs,
        seeds=arguments.seeds,
        kept=arguments.kept,
        place=chosen_place(arguments),
        rerun_changed=arguments.rerun_changed,
        trials_only=arguments.trials_only,
    )
    if result.table is not None:
        status = _print_table(result.table)
    else:
        status = 1 if result.stopped else 0
        for name, error in result.stopped.items():
            print(_text(f"not tuned: {name}: {error}"), file=sys.stderr)
    print(f"all trials: {result.trials}")
    return status


def figure(arguments: argparse.Namespace) -> int:
    """Do the runs that figures of a paper need and draw them, with their numbers as CSV and a caption."""
    for name in arguments.names:
        check_figure(name)
    from benchmark.figures.pfedpt.make import make_figure

    for name in arguments.names:
        made = make_figure(
            name,
            arguments.preset,
            _data_dir(arguments),
            arguments.run_dir,
            arguments.jobs,
            rerun_changed=arguments.rerun_changed,
        )
        print(f"written: {made.png}, {made.csv}, {made.txt}", flush=True)
    return 0


def _data_dir(arguments: argparse.Namespace) -> str | None:
    given = arguments.data_dir or os.environ.get("DATA_DIR")
    return str(user_path(given)) if given else None


def _text(said: str) -> str:
    """Return what a file said, without characters that would steer a terminal."""
    return printable(said, kept="\n")


def resume(arguments: argparse.Namespace) -> int:
    """Go on with a run that was stopped, after the last round it has kept.

    Its config.yaml says which classes are imported and called, and with what: resume only directories you trust.
    """
    from benchmark.run.resume import fit_again
    from benchmark.run.start import main as lightning_cli

    lightning_cli(fit_again(arguments.run_dir, arguments.options))
    return 0


def verify(arguments: argparse.Namespace) -> int:
    """Check records against their files, on request their configuration, or by running again.

    Hashes show damage; they are no signature. With --resolve or --rerun the run's config.yaml says which classes are
    imported and called: use only directories you trust.
    """
    from benchmark.run.verification import check_run

    run_dirs = arguments.run_dirs or sorted(path.parent for path in KEPT_RUNS.glob("*/record.json"))
    if not run_dirs:
        raise ConfigurationError(
            f"there are no runs in {KEPT_RUNS}, seen from {Path.cwd()}; name run directories, as in `benchmark verify "
            "runs/*`, or start the command in the repository's root"
        )
    bad = 0
    for run_dir in run_dirs:
        problems, remarks = check_run(run_dir, arguments.resolve, arguments.rerun, _data_dir(arguments))
        bad += bool(problems)
        print("\n".join(map(_text, [*(problems or [f"{run_dir}: ok"]), *remarks])), flush=True)
    return 1 if bad else 0


def report(arguments: argparse.Namespace) -> int:
    """Write one HTML page of all records and tables that opens from disk."""
    from benchmark.report.page import RESULTS, write_report

    runs, own = arguments.runs, Path("runs")
    if runs is None and arguments.results_dir == RESULTS and not (RESULTS / "runs").is_dir() and own.is_dir():
        runs = own  # a user's folder, with no records but these
    page = write_report(arguments.page, arguments.results_dir, runs)
    print(f"written: {page.path} ({page.path.stat().st_size / 1e6:.1f} MB, {page.runs} runs, {page.tables} tables)")
    for problem in page.problems:
        print(_text(f"left out: {problem}"), file=sys.stderr)
    for each in page.again:
        print(_text(f"not shown: {each}"), file=sys.stderr)
    return 1 if page.problems else 0


def wandb_report(arguments: argparse.Namespace) -> int:
    """Save a report in a W&B project: its runs by data set, setting and method."""
    from benchmark.run.wandb_report import save_report

    entity, _, project = arguments.project.partition("/")
    if not entity or not project:
        raise ConfigurationError(f"expected a project as ENTITY/PROJECT, got {arguments.project}")
    print(f"saved: {save_report(entity, project)}")
    return 0


def reproduction(arguments: argparse.Namespace) -> int:
    """Write results/REPRODUCTION.md: every published table, and what was run of it here."""
    from benchmark.report.reproduction import write_notes

    print(f"written: {write_notes(arguments.results_dir)}")
    return 0


def keep(arguments: argparse.Namespace) -> int:
    """Copy finished runs' small files to results/runs, to be committed."""
    from benchmark.records.keeping import keep_record

    for run_dir in arguments.run_dirs:
        print(f"{run_dir} -> {keep_record(run_dir, KEPT_RUNS)}")
    return 0


def configs(arguments: argparse.Namespace) -> int:
    """List the configurations that ``--config`` knows by name, those of this folder and those that came with it."""
    found = {name: configuration(name) for name in configurations()}
    shown = [name for name in found if name.startswith(arguments.beginning)]
    for name in shown:
        said = _first_comment(found[name])
        print(fill(f"{name:42} {said}".rstrip(), 120, subsequent_indent=" " * 43, break_on_hyphens=False))
    if not shown:
        raise ConfigurationError(f"no configuration's name begins with {arguments.beginning!r}")
    return 0


def _first_comment(path: Path | None) -> str:
    """Return the comment that a file opens with, up to the end of its first sentence."""
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    said = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda each: each.startswith("# "), lines))
    return re.split(r"\. (?=[A-Z])", said)[0].rstrip(".")


def check(arguments: argparse.Namespace) -> int:
    """Check what must hold of one's own method, server's rule, partition, source or metric, a line for each."""
    check_names([Named(arguments.target), *names_in_files(arguments.config)])
    from benchmark.checks.command import check as run_checks

    return 0 if run_checks(arguments.target, arguments.config) else 1


def init(arguments: argparse.Namespace) -> int:
    """Look at a folder of images, and write the configuration of a first run on them."""
    from benchmark.config.first_config import init as write_first

    return write_first(arguments)


def partition(arguments: argparse.Namespace) -> int:
    """Plot a partition, classes x clients: of a run's manifest.json, of a run's configuration or of data's alone."""
    files = filter(None, map(configuration, arguments.what))
    check_names([*names_in_files(path for path in files if path.suffix != ".json")])  # a manifest names no classes
    from benchmark.run.draw_partition import draw_partition

    written = draw_partition(arguments.what, arguments.picture, arguments.split, arguments.set)
    print(f"written: {', '.join(map(str, written))}")
    return 0


def _add_table(entry: argparse.ArgumentParser, kept: str = "finished runs from results/runs") -> None:
    """Add which table is run, and where."""
    entry.add_argument("name", help="a table that `benchmark configs tables/` lists, or a YAML file")
    entry.add_argument(
        "--preset",
        default="demo",
        help="demo (bundled data and models), paper or another of the table's; default %(default)s",
    )
    entry.add_argument("--data_dir", help="folder of the data sets; default the environment's DATA_DIR")
    entry.add_argument("--kept", action="store_true", help=f"take {kept} too")
    _add_rerun(entry)
    add_place(entry)


def _add_rerun(entry: argparse.ArgumentParser) -> None:
    entry.add_argument(
        "--rerun-changed", action="store_true", help="do finished runs again that other code made than the present one"
    )


def _seconds(text: str) -> float:
    """A number of seconds, of a command line."""
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:  # a NaN is not
            return seconds
    raise argparse.ArgumentTypeError(f"expected a number of seconds from 0 on, got {text!r}")


def parser() -> CommandParser:
    """The command line; argparse's help is there before jsonargparse alone would be imported."""
    top = CommandParser(prog="benchmark", description=__doc__)
    top.add_argument("--version", action="version", version=f"%(prog)s {version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser)
    top.commands = commands.choices
    entry = commands.add_parser("table", help=table.__doc__, description=table.__doc__)
    _add_table(entry)
    entry.add_argument("--seeds", type=int, nargs="+", help="in place of the preset's")
    entry.add_argument("--baseline", metavar="ROW", help="compare the other rows with this one, pair by pair")
    entry.add_argument(
        "--by_seed", action="store_true", help="print that comparison of each seed too, and of clients with few images"
    )
    entry.add_argument(
        "--print_config", nargs=2, metavar=("ROW", "DATA"), help="print one run's configuration and run nothing"
    )
    entry.set_defaults(run=table)
    entry = commands.add_parser("tune", help=tune.__doc__, description=tune.__doc__)
    _add_table(entry, "finished runs from results/runs, and trials from results/tuning,")
    entry.add_argument("--trials", type=int, default=16, help="of each row; default %(default)s")
    entry.add_argument("--rounds", type=int, help="of a trial; default the table's own")
    entry.add_argument(
        "--val_fraction", type=float, default=0.2, help="part of the training images held out; default %(default)s"
    )
    entry.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the runs on the test images; default 0 1 2"
    )
    entry.add_argument(
        "--trials_only", action="store_true", help="write the trials; score no test image, make no table"
    )
    entry.set_defaults(run=tune)
    entry = commands.add_parser("figure", help=figure.__doc__, description=figure.__doc__)
    entry.add_argument("names", nargs="+", metavar="NAME", help="pfedpt_fig4, 5, 6, 8, 9, 10 or 11")
    entry.add_argument(
        "--preset",
        default="demo",
        help="demo (bundled data and models), paper or another of the table's; default %(default)s",
    )
    entry.add_argument("--data_dir", help="folder of the data sets; default the environment's DATA_DIR")
    entry.add_argument(
        "--run_dir",
        type=user_path,
        nargs="+",
        default=[],
        help="finished runs with checkpoints, instead of the preset's",
    )
    entry.add_argument("--jobs", type=int, help="runs at a time; default as for tables")
    _add_rerun(entry)
    entry.set_defaults(run=figure)
    records.add_commands(commands)
    entry = commands.add_parser("resume", help=resume.__doc__, description=resume.__doc__)
    entry.add_argument("run_dir", type=user_path)
    entry.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="OPTION", help="of lightning-cli fit: --trainer.max_time=..."
    )
    entry.set_defaults(run=resume)
    add_commands(commands)
    deploy.add_commands(commands)
    boards.add_commands(commands)
    entry = commands.add_parser("configs", help=configs.__doc__, description=configs.__doc__)
    entry.add_argument("beginning", nargs="?", default="", help="of the names, for example suites/; default all")
    entry.set_defaults(run=configs)
    entry = commands.add_parser("check", help=check.__doc__, description=check.__doc__)
    entry.add_argument("target", metavar="CLASS", help="dotted path: my_module.MyMethod")
    entry.add_argument(
        "--config", type=user_path, action="append", default=[], help="of a run that it is part of; default: tiny data"
    )
    entry.set_defaults(run=check)
    entry = commands.add_parser("init", help=init.__doc__, description=init.__doc__)
    entry.add_argument("folder", type=user_path, metavar="FOLDER", help="<class>/*, <domain>/<class>/*, or index.csv")
    entry.add_argument("--out", type=user_path, default=Path("first.yaml"), help="file to write; default %(default)s")
    entry.add_argument("--method", default="fedvpt", help="one of `benchmark configs methods/`; default %(default)s")
    entry.add_argument("--name", help="of the data set, in records; default the folder's")
    entry.set_defaults(run=init)
    entry = commands.add_parser("partition", help=partition.__doc__, description=partition.__doc__)
    entry.add_argument("what", nargs="+", metavar="MANIFEST_OR_CONFIG", help="later configurations win")
    entry.add_argument("picture", type=user_path, metavar="PNG", help="picture to write; the manifest goes beside it")
    entry.add_argument("--split", choices=("train", "test"), default="train")
    entry.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the data: source.root=/data")
    entry.set_defaults(run=partition)
    entry = commands.add_parser("verify", help=verify.__doc__, description=verify.__doc__)
    entry.add_argument("run_dirs", type=user_path, nargs="*", metavar="RUN_DIR", help=f"default: all of {KEPT_RUNS}")
    entry.add_argument("--resolve", action="store_true", help="does the configuration still mean the same?")
    entry.add_argument(
        "--rerun",
        type=_seconds,
        nargs="?",
        const=120.0,
        metavar="SECONDS",
        help="run again what took at most so long, default %(const)s, and compare every number",
    )
    entry.add_argument("--data_dir", help="folder of the data sets, for --rerun; default the environment's DATA_DIR")
    entry.set_defaults(run=verify)
    entry = commands.add_parser("keep", help=keep.__doc__, description=keep.__doc__)
    entry.add_argument("run_dirs", type=user_path, nargs="+", metavar="RUN_DIR")
    entry.set_defaults(run=keep)
    entry = commands.add_parser("report", help=report.__doc__, description=report.__doc__)
    entry.add_argument(
        "page", type=user_path, nargs="?", default=Path("results/report.html"), help="default %(default)s"
    )
    entry.add_argument("--results_dir", type=user_path, default=Path("results"), help="default %(default)s")
    entry.add_argument(
        "--runs", type=user_path, help="a further folder of runs; default runs, where results/runs is missing"
    )
    entry.set_defaults(run=report)
    entry = commands.add_parser("wandb-report", help=wandb_report.__doc__, description=wandb_report.__doc__)
    entry.add_argument("project", metavar="ENTITY/PROJECT", help="after `wandb login`")
    entry.set_defaults(run=wandb_report)
    entry = commands.add_parser("reproduction", help=reproduction.__doc__, description=reproduction.__doc__)
    entry.add_argument("--results_dir", type=user_path, default=Path("results"), help="default %(default)s")
    entry.set_defaults(run=reproduction)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: 0 well, 1 something failed or does not verify, 2 bad input, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what an ASCII terminal cannot show ends no command
            stream.reconfigure(errors="replace")
    try:
        check_numbers()
        check_present_folder()
        given, top = sys.argv[1:] if arguments is None else arguments, parser()
        if not given:
            raise without_command(top)
        top.check_command(given)
        parsed = top.parse_args(given)
        trains = parsed.run in (table, tune, figure)
        with outliving_readers() if trains else contextlib.nullcontext():
            return int(parsed.run(parsed))
    except ConfigurationError as error:
        print(_text(f"benchmark: {error}"), file=sys.stderr)
        return 2
    except BrokenPipeError:  # of `benchmark configs | head`; what Python still has to print goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("benchmark: interrupted; finished runs are not lost, the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
