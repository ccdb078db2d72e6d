"""Entry point of ``lightning-cli``: quiet when interrupted during the seconds in which its libraries are imported."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Import the program and run it; until then Ctrl-C ends in one line, since there is nothing to keep."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _nothing_began)
    from benchmark.run import cli

    signal.signal(signal.SIGINT, before)
    cli.main()


def _nothing_began(number: int, frame: FrameType | None) -> None:
    # At once: an exception inside of an extension's import may become another one.
    sys.stderr.write("interrupted before anything began\n")
    sys.stderr.flush()
    os._exit(128 + number)


if __name__ == "__main__":
    main()
