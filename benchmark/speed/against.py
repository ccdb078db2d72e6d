"""The same cases with the code of an older revision, in the same run: only such ratios say what a change brought."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tabulate import tabulate

from benchmark.errors import ConfigurationError
from benchmark.files import write_json, write_text
from benchmark.records.environment import environment

#: how often each code is measured; a row's time is its best one
TURNS = 2
COLUMNS = ("case", "what", "work", "seconds before", "seconds now", "now / before", "note")
#: where this code lies
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Pair:
    """One measurement with both codes.

    Attributes:
        case: its case.
        what: what was timed.
        work: how much of it.
        before: seconds with the older code; None if that has no such row.
        now: seconds with this code; None likewise.
    """

    case: str
    what: str
    work: str
    before: float | None
    now: float | None

    @property
    def ratio(self) -> float | None:
        """Seconds now divided by those before; None where one is missing or the older code took none."""
        return self.now / self.before if self.now is not None and self.before else None

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its row in the table."""
        numbers = tuple("" if value is None else f"{value:.4g}" for value in (self.before, self.now))
        note = "only now" if self.before is None else "only before" if self.now is None else ""
        return (self.case, self.what, self.work, *numbers, "" if self.ratio is None else f"{self.ratio:.3f}", note)


def compare(
    cases: Sequence[str], revision: str, folder: Path, run_case: Callable[[str, Path, Path], str], root: Path = ROOT
) -> str:
    """Measure the cases with both codes in turns, print one table and write ``folder/against.json`` and ``.md``.

    Args:
        cases: their names.
        revision: of the older code, as git names it.
        folder: where to write.
        run_case: runs a case, writes its results to a folder, with the code that lies in another; returns why it has
            none, or ``""``.
        root: the checkout with this code.

    Returns:
        Which case failed with which code, and why; ``""`` if none did.

    Raises:
        ConfigurationError: no git or no checkout, no such revision, or a case that it lacks.
    """
    older = _commit(revision, root)
    for case in cases:
        if not _git(root, "ls-tree", "--name-only", older, f"benchmark/speed/{case}.py"):
            raise ConfigurationError(f"the code of {revision} has no case {case!r}; name cases that both have")
    times: dict[str, dict[tuple[str, str, str], float]] = {"before": {}, "now": {}}
    with _checked_out(older, root) as code, tempfile.TemporaryDirectory() as written:
        for case in cases:
            for _ in range(TURNS):
                for name, place in (("before", code), ("now", root)):
                    if why := run_case(case, Path(written), place):
                        return f"{case}, {name}: {why}"
                    for row in json.loads((Path(written) / f"{case}.json").read_text())["rows"]:
                        key = (case, row["what"], row["work"])
                        times[name][key] = min(row["seconds"], times[name].get(key, float("inf")))
    before, now = times["before"], times["now"]
    pairs = [Pair(*key, before.get(key), now.get(key)) for key in dict.fromkeys([*now, *before])]
    _report(pairs, f"Now against {revision} ({older[:10]}), best of {TURNS} turns", older, folder)
    return ""


def _report(pairs: Sequence[Pair], title: str, older: str, folder: Path) -> None:
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in COLUMNS[3:6] else "left")
    for pair in pairs:
        table.add_row(*pair.cells())
    Console(width=160).print(table)
    folder.mkdir(parents=True, exist_ok=True)
    body = tabulate([pair.cells() for pair in pairs], list(COLUMNS), tablefmt="pipe", disable_numparse=True)
    write_text(folder / "against.md", f"# {title}\n\n{body}\n")
    rows = [{**asdict(pair), "ratio": pair.ratio} for pair in pairs]
    write_json(folder / "against.json", {"title": title, "against": older, "rows": rows, **environment()})


@contextmanager
def _checked_out(commit: str, root: Path) -> Iterator[Path]:
    """A folder with the code of a commit, gone afterwards, however the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        try:
            _git(root, "worktree", "add", "--detach", str(code), commit)
            yield code
        finally:
            _git(root, "worktree", "remove", "--force", str(code))


def _commit(revision: str, root: Path) -> str:
    """The hash of a revision."""
    try:
        _git(root, "rev-parse", "--git-dir")
    except FileNotFoundError:
        raise ConfigurationError("--against needs git, and there is no such command; install it") from None
    except subprocess.CalledProcessError:
        raise ConfigurationError(f"--against needs a git checkout, and {root} is none; clone the repository") from None
    try:
        return _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    except subprocess.CalledProcessError:
        raise ConfigurationError(f"git knows no revision {revision!r}; `git log` lists those of this branch") from None


def _git(root: Path, *arguments: str) -> str:
    """Run git in ``root`` and return its output."""
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
