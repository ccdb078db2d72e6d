"""The progress display of a run: a live table and a bar in a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Protocol

from benchmark.run.pace import Pace, clock

if TYPE_CHECKING:  # slow to import
    from rich.console import RenderableType

#: What stands in lines and tables at most: rounds of a table, evaluated numbers of a round.
ROUNDS, SCORES = 10, 6
#: Characters of a column's head in a line, and of the table's columns without scores.
HEAD, OTHER_COLUMNS = 12, 28
#: Lines about rounds that a log gets at most, but for those of long waits.
LINES = 100
#: Seconds without a line after which one says how far the round is.
PATIENCE = 60.0


@dataclass(frozen=True)
class RoundRow:
    """A finished round.

    Attributes:
        number: of the round.
        loss: mean over the clients that trained, if any did.
        scores: by title, such as ``after aggregation``, averages over clients in per cent; empty where it was not
            evaluated.
        seconds: it took.
        epsilon: what the rounds until then have cost of privacy; None where nothing is promised.
    """

    number: int
    loss: float | None
    scores: dict[str, float]
    seconds: float
    epsilon: float | None = None


class RoundDisplay(Protocol):
    """Shows a run's pace."""

    def begin(self) -> None:
        """The run begins."""

    def look(self) -> None:
        """Something was done; called after each local step."""

    def before_training(self, scores: dict[str, float]) -> None:
        """The evaluation before any training is done."""

    def finished(self, row: RoundRow) -> None:
        """A round is done."""

    def end(self) -> None:
        """The run ends, in whatever way."""


def in_terminal() -> bool:
    """Return whether standard output is a terminal that can move its cursor."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class Lines:
    """Plain lines, without control characters, for logs: of at most ``LINES`` rounds, and where one takes long.

    Args:
        pace: what they tell of.
    """

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._said = time.monotonic()

    def begin(self) -> None:
        """Say nothing: the run has named its directory."""

    def look(self) -> None:
        """Say how far the round is if nothing was said for a while."""
        if time.monotonic() - self._said > PATIENCE:
            self._say("  ".join(_state(self.pace)))

    def before_training(self, scores: dict[str, float]) -> None:
        """Say what there was to begin with."""
        self._say(f"before training  {_in_line(scores)}")

    def finished(self, row: RoundRow) -> None:
        """Say what the round has come to."""
        rounds = self.pace.rounds
        if row.number % max(1, rounds // LINES) and row.number not in (1, rounds):
            return
        loss = "" if row.loss is None else f"loss {row.loss:.4f}"
        epsilon = "" if row.epsilon is None else f"epsilon {row.epsilon:.3g}"
        parts = [f"round {row.number}/{rounds}", loss, _in_line(row.scores), epsilon, _left(self.pace)]
        self._say("  ".join(part for part in parts if part))

    def end(self) -> None:
        """Say nothing: the command line says how a run has ended."""

    def _say(self, line: str) -> None:
        print(f"{line}\n", end="", flush=True)  # at once: a signal in between would leave the line open
        self._said = time.monotonic()


class Screen:
    """A table of the last rounds, and below it the present one and a bar for the whole run; 80 columns suffice.

    Args:
        pace: what it shows.
    """

    def __init__(self, pace: Pace) -> None:
        from rich.console import Console
        from rich.live import Live

        self.pace = pace
        self.rows: deque[RoundRow] = deque(maxlen=ROUNDS)
        self.working = False
        self.console = Console(force_terminal=True, highlight=False, markup=False)
        self.live = Live(console=self.console, get_renderable=self._all, auto_refresh=True, refresh_per_second=4)

    def begin(self) -> None:
        """Take the bottom of the screen; what others print stands above it."""
        self.working = True
        self.live.start()

    def look(self) -> None:
        """Do nothing: the screen refreshes itself four times a second."""

    def before_training(self, scores: dict[str, float]) -> None:
        """A row for round 0."""
        self.rows.append(RoundRow(0, None, scores, 0.0))

    def finished(self, row: RoundRow) -> None:
        """A row more."""
        self.rows.append(row)

    def end(self) -> None:
        """Leave the table and give the screen back."""
        if self.working:
            self.working = False
            self.live.stop()

    def _all(self) -> "RenderableType":
        from rich.console import Group

        return Group(*([self._table()] if self.rows else []), *(self._present() if self.working else []))

    def _table(self) -> "RenderableType":
        from rich import box
        from rich.table import Table

        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="accuracy in %", caption_justify="left")
        rows = list(self.rows)  # at once: a round may end while this thread draws
        titles = list(dict.fromkeys(title for row in rows for title in row.scores))
        heads = {title: fill(title, HEAD, break_long_words=False) for title in titles}
        room = self.console.width - OTHER_COLUMNS
        while titles and sum(3 + max(map(len, heads[title].splitlines())) for title in titles) > room:
            titles.pop()
        private = ["epsilon"] if any(row.epsilon is not None for row in rows) else []
        for head in ("round", "loss", *(heads[title] for title in titles), *private, "time"):
            shown.add_column(head, justify="right", no_wrap=True)
        for row in rows[-max(1, self.console.height - 9) :]:
            scores = (f"{row.scores[title]:.2f}" if title in row.scores else "" for title in titles)
            loss = "" if row.loss is None else f"{row.loss:.4f}"
            cost = ["" if row.epsilon is None else f"{row.epsilon:.3g}" for _ in private]
            shown.add_row(str(row.number), loss, *scores, *cost, clock(row.seconds) if row.number else "")
        return shown

    def _present(self) -> "Iterator[RenderableType]":
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        yield Text(" · ".join(_state(self.pace)), no_wrap=True, overflow="ellipsis")
        if not self.pace.rounds:
            return
        line = Table.grid(padding=(0, 1))
        done = f"{100 * self.pace.done:.0f} % of {self.pace.rounds} rounds"
        bar = ProgressBar(1.0, self.pace.done, width=30, complete_style="cyan", finished_style="green")
        line.add_row(bar, done, _left(self.pace))
        yield line


def display_for(pace: Pace) -> RoundDisplay:
    """The display that suits where the output goes."""
    return Screen(pace) if in_terminal() else Lines(pace)


def _state(pace: Pace) -> Iterator[str]:
    """Describe the present state of a round, part by part."""
    if pace.rounds:
        yield f"round {pace.number}/{pace.rounds}" if pace.number else "before training"
    if pace.part == "evaluation":
        yield f"evaluation {100 * pace.evaluated:.0f} %"
        return
    if pace.part == "training":
        yield f"local training, step {pace.step:,} of {pace.steps:,}"
    if pace.loss is not None:
        yield f"loss {pace.loss:.4f}"
    if pace.part == "training":
        ids = ", ".join(str(client) for client in pace.clients[:4])
        yield f"clients {ids}" + (f" … {len(pace.clients)}" if len(pace.clients) > 4 else "")


def _in_line(scores: dict[str, float]) -> str:
    """Scores as ``accuracy after aggregation 89.14 %, after local training 90.20 %``."""
    if not scores:
        return "not evaluated"
    return "accuracy " + ", ".join(f"{title} {value:.2f} %" for title, value in scores.items())


def _left(pace: Pace) -> str:
    """Return the remaining time in words; empty while it is not known, and at the end."""
    left = pace.left
    return "" if left is None or pace.done >= 1 else f"{clock(left)} left"
