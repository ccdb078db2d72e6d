"""One runner at a time for each cell."""

from pathlib import Path

from benchmark.locks import FileLock


class CellLock(FileLock):
    """A lock on a run directory, held by the runner *and* by the cell's process.

    A killed runner blocks nobody, and while its cell still goes on, no other runner starts that cell a second time. The
    file says who has it, and whether the last attempt failed; it is never deleted (deleting would let two runners hold
    two files of one name).
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir / "lock")

    def failure(self) -> str | None:
        """The error of the last attempt; None if it did not fail."""
        state, _, rest = self.read().partition(":")
        return rest.partition("\n")[2].strip() if state == "failed" else None
