"""Entry point of ``lightning-cli``: what can be said before libraries are imported, and a signal in those seconds."""

import gc
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from benchmark.command_parser import without_command
from benchmark.config.given_files import with_files_read
from benchmark.config.overview import overview
from benchmark.errors import ConfigurationError
from benchmark.paths import check_present_folder
from benchmark.ranks.process_numbers import check_numbers
from benchmark.run.resume import run_dir_of_fit, what_is_kept, with_config_of_run
from benchmark.run.run_directory import last_checkpoint


def main(arguments: Sequence[str] | None = None) -> None:
    """Import the program and run it.

    A signal before it runs ends in one line, with what an earlier command has kept; so do files and options that are
    wrong, as far as that can be seen without the libraries.

    Args:
        arguments: of ``lightning-cli``, instead of those of the process.
    """
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if given in (["-h"], ["--help"], ["--version"]):
        overview().parse_args(given)
    try:
        if not given:
            raise without_command(overview())
        check_numbers()
        check_present_folder()
        with_files_read(with_config_of_run(given))
        run_dir = run_dir_of_fit(given)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    # What torch would say of connections, stacks of its own included, the run says in a line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    kept = "" if run_dir is None or not last_checkpoint(run_dir).is_file() else f": {what_is_kept(run_dir, given)}"

    def end(number: int, frame: FrameType | None) -> None:
        # At once: an exception inside of an extension's import may become another one.
        sys.stderr.write(f"interrupted before anything began{kept}\n")
        sys.stderr.flush()
        os._exit(128 + number)

    heeded = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if _is_heeded(number)]
    before = {number: signal.signal(number, end) for number in heeded}
    gc.disable()  # nothing that an import makes is garbage; looking for it takes a fifth of the imports' time
    from benchmark.run import cli

    gc.enable()
    for number, handler in before.items():
        signal.signal(number, handler)
    cli.main(given)


def _is_heeded(number: signal.Signals) -> bool:
    return signal.getsignal(number) is not signal.SIG_IGN


if __name__ == "__main__":
    main()
