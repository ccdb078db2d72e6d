"""The messages at the end of a run: its scores and the next commands, or the reason why it was stopped."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import harmonic_mean
from typing import Any, NoReturn

from benchmark.metrics import STATISTICS
from benchmark.ranks.strategy import are_connected
from benchmark.records.record_file import read_record
from benchmark.records.words import POINT_WORDS, metric_number
from benchmark.run.run_directory import last_checkpoint

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
    """Return the closing lines of a finished run: its scores, the path of its record, and commands that show more.

    Args:
        run_dir: directory with the record.
        server_rounds: number of rounds that were trained.
        asked: number of rounds that the configuration asks for.
    """
    record = read_record(run_dir)
    scores = score_lines(record.summary, server_rounds) + privacy_lines(record.privacy)
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


def privacy_lines(privacy: Mapping[str, Any] | None) -> list[str]:
    """Say what a run promises of privacy, as its record has it; nothing where it promises nothing."""
    if privacy is None:
        return []
    if privacy["epsilon"] is None:
        return ["no privacy: updates were clipped, without noise"]
    one = "client" if privacy["unit"] == "user" else "image"
    return [
        f"differentially private per {one}: epsilon {privacy['epsilon']:.3g} at delta {privacy['delta']:g} "
        f"({privacy['relation'].replace('_', ' ')}), by {privacy['accountant']}; the record says what is not covered"
    ]


def score_lines(summary: Mapping[str, Any], rounds: int) -> list[str]:
    """Say the last accuracy on each split and, of a base-to-novel run, the harmonic mean.

    Args:
        summary: of the record.
        rounds: that were trained.
    """
    last: dict[str, dict[str, Mapping[str, float]]] = {}
    for point, words in POINT_WORDS.items():
        for split, metrics in summary.get(point, {}).items():
            if "accuracy" in metrics and split != "train":
                last.setdefault(split, {})[words] = metrics["accuracy"]["last"] | {
                    "clients": metrics["accuracy"]["clients"]
                }
    lines, worst = [], STATISTICS["worst"]
    for split in sorted(last, key=lambda name: {"val": 0, "test": 1}.get(name, 2)):
        most = max(found["clients"] for found in last[split].values())
        said = (
            f"{words} {_percent(found['average'])} ({worst.words} {_percent(found[worst.name])}"
            + (f"; of the {found['clients']} clients that have trained)" if found["clients"] < most else ")")
            for words, found in last[split].items()
        )
        lines.append(f"{split} accuracy after round {rounds}: {', '.join(said)}")
    if {"test", "base", "novel"} <= set(last):
        means = (
            f"{words} {_percent(harmonic_mean([last[split][words]['average'] for split in ('test', 'base', 'novel')]))}"
            for words in last["test"]
        )
        lines.append(f"harmonic mean of test, base and novel: {', '.join(means)}")
    return lines


def _percent(value: float) -> str:
    return f"{metric_number(value, 'accuracy')} %"
