"""The configuration that arguments of ``lightning-cli`` make."""

import contextlib
import io
from collections.abc import Sequence
from typing import Any

from benchmark.config.yaml_files import parse_yaml
from benchmark.errors import ConfigurationError


def resolved(arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration that arguments of ``lightning-cli fit`` make, with every default; nothing is built.

    Raises:
        ConfigurationError: the command line refuses them.
        KeyboardInterrupt: a signal asked this process to end meanwhile.
    """
    from benchmark.run.cli import main

    printed, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complained):
        try:
            main(["fit", *arguments, "--print_config"])
        except SystemExit as error:
            if isinstance(error.code, int) and error.code > 128:  # by a signal
                raise KeyboardInterrupt from error
            if error.code not in (0, None):
                said = complained.getvalue().strip().splitlines()
                raise ConfigurationError(said[-1].removeprefix("error: ") if said else "no reason given") from error
    return dict(parse_yaml(printed.getvalue(), "the resolved configuration"))
