"""Going on with a run from its directory alone."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import all_suffixes
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from benchmark.config.yaml_files import read_mapping
from benchmark.errors import ConfigurationError
from benchmark.files import check_no_links
from benchmark.paths import user_path
from benchmark.records.record_file import is_finished
from benchmark.run.run_directory import last_checkpoint

#: The whole name of a class.
CLASS = re.compile(r"[A-Za-z_]\w*(\.\w+)+")


def config_of(run_dir: Path) -> Path:
    """The configuration of a run, for the run's own checkpoint.

    Raises:
        ConfigurationError: the folder is none of a run, links in it lead elsewhere, or its configuration names a class
            that lies in it.
    """
    config = run_dir / "config.yaml"
    check_no_links(run_dir)
    if not config.is_file():
        why = "holds no config.yaml, as a run directory does" if run_dir.is_dir() else "is no folder"
        raise ConfigurationError(f"{run_dir} {why}; give the directory that the run named when it began")
    _check_brings_no_code(run_dir, read_mapping(config))
    return config


def _check_brings_no_code(run_dir: Path, config: Any) -> None:
    """Refuse a configuration that names a module which the run directory itself has brought along.

    It is looked for in the working directory too, where a process that is started from here (``python -m``) finds it.

    Raises:
        ConfigurationError: it does.
    """
    inside = run_dir.resolve()
    for name in filter(CLASS.fullmatch, _texts(config)):
        modules = accumulate(name.split(".")[:-1], lambda package, module: f"{package}/{module}")
        for entry, module in product(["", *sys.path], modules):
            at = Path(entry, module)
            found = at.is_dir() or any(Path(f"{at}{suffix}").is_file() for suffix in all_suffixes())
            if found and at.resolve().is_relative_to(inside):
                raise ConfigurationError(
                    f"{run_dir}/config.yaml names {name}, which lies in {run_dir} itself: a run leaves no code, and "
                    "none is run from there; move the module elsewhere, if you trust it"
                )


def _texts(content: Any) -> Iterator[str]:
    """Yield all texts among the values of nested mappings and lists."""
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _texts(value)
    elif isinstance(content, str):
        yield content


def with_config_of_run(arguments: list[str]) -> list[str]:
    """``test --run_dir=RUN_DIR`` takes the configuration of that run, where none is given."""
    given = _named(arguments)
    if arguments[:1] in (["validate"], ["test"]) and given.run_dir and given.config is None:
        return [arguments[0], f"--config={config_of(user_path(given.run_dir))}", *arguments[1:]]
    return arguments


def fit_again(run_dir: Path, options: Sequence[str]) -> list[str]:
    """The arguments of ``lightning-cli`` that go on with a run after the last round it has kept.

    Args:
        run_dir: of an unfinished run.
        options: further ones, which win over the run's configuration.

    Raises:
        ConfigurationError: the folder is none of a run, or there is nothing in it to go on with or from.
    """
    config_of(run_dir)
    again, last = _again(run_dir), last_checkpoint(run_dir)
    start = ["lightning-cli", *again[:2]]
    if is_finished(run_dir):
        more = shlex.join([*start, f"--ckpt_path={last}", "--trainer.max_epochs=ROUNDS"])
        raise ConfigurationError(
            f"{run_dir} holds a finished run; for more rounds, in a directory of their own: {more}"
        )
    if not last.is_file():
        anew = shlex.join([*start, f"--run_dir={run_dir}"])
        raise ConfigurationError(f"{run_dir} has no finished round to go on from; start it again: {anew}")
    return [*again, *options]


def run_dir_of_fit(arguments: Sequence[str]) -> Path | None:
    """The run directory that a command line of ``fit`` names; None where it names none."""
    given = _named(arguments).run_dir
    return user_path(given) if list(arguments[:1]) == ["fit"] and given else None


def what_is_kept(run_dir: Path | None, arguments: Sequence[str], rounds_of: Callable[[Path], int] | None = None) -> str:
    """Describe in one line what is kept of an unfinished run, and the command that resumes it.

    Args:
        run_dir: directory of the run; None if no run had begun.
        arguments: arguments of the ``lightning-cli`` that started or resumed the run.
        rounds_of: returns the number of rounds in a checkpoint; None if there is no time to read one.
    """
    if run_dir is None:
        return "there was nothing to keep yet; the same command starts again"
    if is_finished(run_dir):
        return f"the run is finished, its record is {run_dir / 'record.json'}"
    last = last_checkpoint(run_dir)
    if not last.is_file():
        return "no round is finished and kept yet; the same command starts again"
    kept = "the last finished round" if rounds_of is None else f"round {rounds_of(last)}"
    return f"kept up to {kept}; go on with: {_going_on(run_dir, arguments)}"


def _going_on(run_dir: Path, arguments: Sequence[str]) -> str:
    """The command that goes on with a run: the one that did so, with its options, or else ``benchmark resume``."""
    again = _again(run_dir)
    resumed = list(arguments[: len(again)]) == again
    if not resumed and _named(arguments).ckpt_path in ("last", str(last_checkpoint(run_dir))):
        return shlex.join(["lightning-cli", *arguments])
    return shlex.join(["benchmark", "resume", str(run_dir), *(arguments[len(again) :] if resumed else ())])


def _again(run_dir: Path) -> list[str]:
    return ["fit", f"--config={run_dir / 'config.yaml'}", f"--run_dir={run_dir}", "--ckpt_path=last"]


def _named(arguments: Sequence[str]) -> argparse.Namespace:
    """The files and folders of a run that a command line names."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("-c", "--config", nargs="?")
    options.add_argument("--run_dir", nargs="?")
    options.add_argument("--ckpt_path", nargs="?")
    return options.parse_known_args(list(arguments[1:]))[0]
