"""``benchmark board``: its options, and what it prints."""

import argparse
from pathlib import Path
from typing import Any

from benchmark.boards.board import Board, names_of_boards, read_board
from benchmark.errors import printable
from benchmark.paths import user_path


def listed(arguments: argparse.Namespace) -> int:
    """List the boards."""
    for name in names_of_boards(arguments.results_dir):
        board = read_board(name, arguments.results_dir)
        print(printable(f"{name:36} {board.title}, {len(board.rows)} rows"))
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Rank the rows of a board, print them and write them beside its file."""
    page = _write(read_board(arguments.name, arguments.results_dir), arguments.results_dir)
    print(printable(page.read_text(), "\n"), end="")
    return 0


def freeze(arguments: argparse.Namespace) -> int:
    """Make a board of a table's kept runs on one of its data groups."""
    from benchmark.boards.freeze import freeze

    where = (arguments.table, arguments.preset, arguments.data, arguments.floor)
    _write(freeze(arguments.name, *where, arguments.results_dir, arguments.metric), arguments.results_dir)
    return 0


def submit(arguments: argparse.Namespace) -> int:
    """Check finished runs against a board, keep them and add them to it as a row."""
    from benchmark.boards.submit import submit

    made = submit(arguments.name, arguments.label, arguments.run_dirs, arguments.point, arguments.results_dir)
    for remark in made.remarks:
        print(printable(f"remark: {remark}"))
    _tell(made.files)
    return 0


def _write(board: Board, results_dir: Path) -> Path:
    """Write a board's page and values, say so, and return the page."""
    from benchmark.boards.ranking import write_ranking

    files = write_ranking(board, results_dir)
    _tell(files)
    return files[0]


def _tell(files: tuple[Path, Path]) -> None:
    print(f"written: {files[0]}, {files[1]}")


def add_commands(commands: Any) -> None:
    """Add the command to those of ``benchmark``."""
    about = "Boards: frozen images, partitions, backbone and budget, for which anybody may submit finished runs."
    entry = commands.add_parser("board", help=about, description=about)
    below = entry.add_subparsers(dest="what", required=True, metavar="WHAT")
    entries = {}
    for name, does in {"list": listed, "show": show, "freeze": freeze, "submit": submit}.items():
        entry = entries[name] = below.add_parser(name, help=does.__doc__, description=does.__doc__)
        if name != "list":
            entry.add_argument("name", metavar="BOARD", help="its name, such as office_floors_v1")
        entry.add_argument("--results_dir", type=user_path, default=Path("results"), help="default %(default)s")
        entry.set_defaults(run=does)
    entry = entries["freeze"]
    entry.add_argument("table", metavar="TABLE", help="name of a table")
    entry.add_argument("--preset", required=True)
    entry.add_argument("--data", required=True, help="name of one of the preset's data groups")
    entry.add_argument("--floor", required=True, metavar="ROW", help="label of the row that needs no training")
    entry.add_argument("--metric", help="what rows are ranked by; default the table's")
    entry = entries["submit"]
    entry.add_argument("run_dirs", type=user_path, nargs="+", metavar="RUN_DIR", help="one for each seed of the board")
    entry.add_argument("--label", required=True, help="of the new row")
    entry.add_argument("--point", choices=("server", "local"), default="server", help="where in a round it is read")
