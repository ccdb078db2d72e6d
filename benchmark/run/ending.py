"""What a run says when it ends: its scores and what to do with it, or why it was stopped."""

import os
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from benchmark.records.record_file import read_record
from benchmark.run.run_directory import last_checkpoint
from benchmark.run.strategy import are_connected

#: Exit status of a run that ``trainer.max_time`` ended, as of ``timeout``.
OUT_OF_TIME = 124


class StoppedError(Exception):
    """A run ended before its last round, as it was asked to.

    Args:
        message: one line: why, what is kept and how to go on.
        code: exit status.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def end_process(said: str, code: int) -> NoReturn:
    """Say why a run ends, and end it: with other processes that may be gone, without waiting for them."""
    if said:
        print(said, file=sys.stderr)
    if are_connected():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def closing_lines(run_dir: Path, server_rounds: int, asked: int) -> list[str]:
    """What a finished run has come to, where its record is, and the commands that show more of it.

    Args:
        run_dir: holds the record.
        server_rounds: that were trained.
        asked: that the configuration asks for.
    """
    summary = read_record(run_dir).summary
    scores = []
    for split in ("val", "test"):
        found = {p: summary.get(p, {}).get(split, {}).get("accuracy") for p in ("server", "local")}
        counts = [entry["clients"] for entry in found.values() if entry]
        said = [
            f"{point} {100 * entry['last']['average']:.2f} % (worst client {100 * entry['last']['worst']:.2f} %"
            + (f"; of the {entry['clients']} clients that have trained)" if entry["clients"] < max(counts) else ")")
            for point, entry in found.items()
            if entry
        ]
        scores += [f"{split} accuracy after round {server_rounds}: {', '.join(said)}"] if said else []
    early = f" (stopped early, after round {server_rounds} of {asked})" if server_rounds < asked else ""
    folder = shlex.quote(str(run_dir))
    commands = {
        f"benchmark show {folder}": "the record's summary",
        f"lightning-cli test --run_dir={folder}": "every client's scores",
        f"benchmark partition {folder}/manifest.json partition.png": "who holds which classes",
    }
    if not last_checkpoint(run_dir).is_file():
        commands.pop(f"lightning-cli test --run_dir={folder}")
    width = max(map(len, commands))
    return [
        *scores,
        f"record: {run_dir / 'record.json'}{early}",
        *(f"  {command:{width}}  # {what}" for command, what in commands.items()),
    ]
