"""Going on with a run from its directory alone."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.records.record_file import is_finished
from benchmark.run.run_directory import last_checkpoint


def config_of(run_dir: Path) -> Path:
    """The configuration of a run, for the run's own checkpoint.

    Raises:
        ConfigurationError: the folder is none of a run.
    """
    config = run_dir / "config.yaml"
    if not config.is_file():
        why = "holds no config.yaml, as a run directory does" if run_dir.is_dir() else "is no folder"
        raise ConfigurationError(f"{run_dir} {why}; give the directory that the run named when it began")
    return config


def with_config_of_run(arguments: list[str]) -> list[str]:
    """``test --run_dir=RUN_DIR`` takes the configuration of that run, where none is given."""
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("-c", "--config", nargs="?")
    options.add_argument("--run_dir", nargs="?")
    given, _ = options.parse_known_args(arguments[1:])
    if arguments[:1] in (["validate"], ["test"]) and given.run_dir and given.config is None:
        return [arguments[0], f"--config={config_of(Path(given.run_dir))}", *arguments[1:]]
    return arguments


def fit_again(run_dir: Path, options: Sequence[str]) -> list[str]:
    """The arguments of ``lightning-cli`` that go on with a run after the last round it has kept.

    Args:
        run_dir: of an unfinished run.
        options: further ones, which win over the run's configuration.

    Raises:
        ConfigurationError: the folder is none of a run, or there is nothing in it to go on with or from.
    """
    config, last = config_of(run_dir), last_checkpoint(run_dir)
    start = ["lightning-cli", "fit", f"--config={config}"]
    if is_finished(run_dir):
        more = shlex.join([*start, f"--ckpt_path={last}", "--trainer.max_epochs=ROUNDS"])
        raise ConfigurationError(
            f"{run_dir} holds a finished run; for more rounds, in a directory of their own: {more}"
        )
    if not last.is_file():
        anew = shlex.join([*start, f"--run_dir={run_dir}"])
        raise ConfigurationError(f"{run_dir} has kept no round to go on from; start it again: {anew}")
    return [*start[1:], f"--run_dir={run_dir}", "--ckpt_path=last", *options]
