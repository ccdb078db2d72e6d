"""``benchmark predict`` and ``benchmark export``: their options, and what they print."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError, printable
from benchmark.paths import user_path
from benchmark.predict.given import check_there
from benchmark.run.resume import config_of

if TYPE_CHECKING:  # slow to import
    from benchmark.predict.client_model import ClientModel
    from benchmark.predict.trained_run import TrainedRun


def predict(arguments: argparse.Namespace) -> int:
    """Classify images as a client of a finished run does: a line of CSV for each, path, class and probability.

    The run's config.yaml says which classes are imported and called: use only directories you trust.
    """
    _check_new(arguments.out, arguments.overwrite)
    for images in arguments.images:
        check_there(images)
    config_of(arguments.run_dir)
    from benchmark.predict.answers import Unread, answers, cells, csv_line, csv_path, heads
    from benchmark.predict.files import decoded, decoding_of, list_files

    files, remarks = list_files(arguments.images)
    _, model = _asked_for(arguments)
    unread = 0
    with _output(arguments.out) as write:
        write(csv_line("path", *heads(model.class_names, arguments.top, arguments.every)))
        found = ((str(path), pixels) for path, pixels in decoded(files, decoding_of(model.facts)))
        for answer in answers(model, found, arguments.batch_size):
            if isinstance(answer, Unread):
                _tell(f"left out: {answer.why}")
                unread += 1
            else:
                made = cells(answer, model.class_names, arguments.top, arguments.every)
                write(csv_line(csv_path(answer.name), *made))
        if unread == len(files):
            raise ConfigurationError("none of the images could be read")
    for remark in remarks:
        _tell(f"left out: {remark}")
    where = f", written: {arguments.out}" if arguments.out else ""
    count = len(files) - unread
    _tell(f"{count} image{'s' * (count != 1)} classified{where}")
    return 1 if unread or remarks else 0


def export(arguments: argparse.Namespace) -> int:
    """Write a client's model of a finished run as files that need none of this code: images in, logits out.

    The run's config.yaml says which classes are imported and called: use only directories you trust.
    """
    config_of(arguments.run_dir)
    from benchmark.predict.export import check_folder, check_onnx
    from benchmark.predict.export import export as write

    check_folder(arguments.folder, arguments.overwrite)
    if arguments.onnx:
        check_onnx()
    run, model = _asked_for(arguments)
    for path in write(model, arguments.folder, run.described(), arguments.onnx):
        _tell(f"written: {path} ({path.stat().st_size / 1e3:,.1f} kB)")
    return 0


def _asked_for(arguments: argparse.Namespace) -> "tuple[TrainedRun, ClientModel]":
    """Open the run, and say whose model is asked."""
    from benchmark.predict.trained_run import TrainedRun
    from benchmark.records.words import POINT_WORDS
    from benchmark.run.cli import prepare_process

    prepare_process()
    if arguments.new_client is not None and (arguments.client is not None or arguments.point is not None):
        raise ConfigurationError("--new_client is a client of its own, after aggregation; leave --client and --point")
    run = TrainedRun(arguments.run_dir, arguments.data_dir, arguments.device)
    if arguments.new_client is None:
        model = run.client(arguments.client, arguments.point)
        common = arguments.client is None and run.site is None
        whose = "the one model of all clients" if common else f"client {model.client} ({model.name})"
        where = POINT_WORDS[model.point]
    else:
        model = run.new_client(arguments.new_client)
        whose, fits = f"new client {model.name}", run.fits_new_clients
        where = f"fitted on {model.facts.train_sizes[-1]} images" if fits else "to whom this method fits nothing"
    _tell(f"{run.name}, round {run.rounds}, {whose}, {where}")
    for remark in run.remarks(model):
        _tell(remark)
    return run, model


def _check_new(path: Path | None, overwrite: bool) -> None:
    """Refuse to write over what is there."""
    if path is not None and path.exists() and not overwrite:
        raise ConfigurationError(f"{path} exists; give another --out, or --overwrite")


@contextmanager
def _output(path: Path | None) -> Iterator[Callable[[str], object]]:
    """Write lines to a new file, which is there whole or not at all; or print them."""
    if path is None:
        seen = sys.stdout.isatty()
        yield lambda line: sys.stdout.write(printable(line, kept="\n") if seen else line)
        return
    from benchmark.files import replacing

    with replacing(path) as stream:
        yield lambda line: stream.write(line.encode(errors="backslashreplace"))


def _tell(said: str) -> None:
    """Say something beside the answers."""
    print(printable(said), file=sys.stderr, flush=True)


def add_commands(commands: Any) -> None:
    """Add both commands to those of ``benchmark``."""
    entry = commands.add_parser("predict", help=predict.__doc__, description=predict.__doc__)
    entry.add_argument("run_dir", type=user_path, metavar="RUN_DIR")
    entry.add_argument(
        "images", type=user_path, nargs="+", metavar="IMAGES", help="images, folders, or lists: CSV with a column path"
    )
    _add_client(entry)
    entry.add_argument("--out", type=user_path, metavar="CSV", help="file to write; default: it is printed")
    entry.add_argument("--overwrite", action="store_true", help="write over a file that is there")
    entry.add_argument("--top", type=_positive, default=1, help="classes for each image; default %(default)s")
    entry.add_argument("--all", dest="every", action="store_true", help="a column with the probability of each class")
    entry.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1; default %(default)s")
    entry.add_argument("--batch_size", type=_positive, help="images at a time; default the run's, in its evaluations")
    entry.set_defaults(run=predict)
    entry = commands.add_parser("export", help=export.__doc__, description=export.__doc__)
    entry.add_argument("run_dir", type=user_path, metavar="RUN_DIR")
    entry.add_argument("folder", type=user_path, metavar="OUT", help="folder to write into")
    _add_client(entry)
    entry.add_argument("--onnx", action="store_true", help="also as ONNX")
    entry.add_argument("--overwrite", action="store_true", help="write over files that are there")
    entry.set_defaults(run=export, device="cpu")  # a graph made on a GPU asks for one


def _add_client(entry: argparse.ArgumentParser) -> None:
    """Add whose model is asked for, and where."""
    entry.add_argument("--client", help="name or number; not needed where all clients have one model")
    entry.add_argument(
        "--new_client",
        type=user_path,
        metavar="FOLDER",
        help="of labelled images, a folder for each class: a client more, fitted on them first as the method says",
    )
    entry.add_argument(
        "--point",
        choices=("server", "local"),
        help="after aggregation, or after local training; default where the method's paper reads it",
    )
    entry.add_argument(
        "--data_dir", type=user_path, help="folder of the data sets, where they are needed and lie elsewhere now"
    )


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, got {text!r}")
