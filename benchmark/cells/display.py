"""The progress display of cells while they run."""

import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from benchmark.cells.log import tail

if TYPE_CHECKING:
    from rich.console import Console


SHOWN_RUNS = 12
ROUND_LINE = re.compile(r"round (\d+)/(\d+)\s*(.*)")


class RunsDisplay:
    """A progress display of cells.

    A terminal shows a live block with a line for all cells together and one per running cell. Elsewhere only the plain
    lines of :meth:`line` are printed.
    """

    def __init__(self, total: int, console: "Console | None" = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self.live = (
            Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[said]}", markup=False),
                console=self.console,
            )
            if self.console.is_terminal
            else None
        )
        self.total = total
        self.task = self.live.add_task("runs", total=total, said="") if self.live else None
        self.bars: dict[str, Any] = {}

    def __enter__(self) -> "RunsDisplay":
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live:
            self.live.stop()

    def line(self, text: str) -> None:
        if self.live:
            self.console.print(text)
        else:
            print(text, flush=True)

    def update(self, done: int, failed: int, running: dict[str, Path]) -> None:
        """Show the number of finished cells, and the last round that the log of each running cell names."""
        if self.live is None or self.task is None:
            return
        hidden = len(running) - SHOWN_RUNS
        said = [f"{failed} failed"] if failed else []
        said += [f"{len(running)} at work, {hidden} of them not shown"] if hidden > 0 else []
        self.live.update(self.task, completed=done, said=", ".join(said))
        for name in set(self.bars) - set(running):
            self.live.remove_task(self.bars.pop(name))
        for name, log in running.items():
            if name not in self.bars:
                if len(self.bars) == SHOWN_RUNS:
                    continue
                self.bars[name] = self.live.add_task(f"  {name}", total=None, said="starting")
            rounds = next((found for line in reversed(tail(log)) if (found := ROUND_LINE.match(line))), None)
            if rounds:
                reached, total, text = rounds.groups()
                self.live.update(self.bars[name], completed=int(reached), total=int(total), said=text)
