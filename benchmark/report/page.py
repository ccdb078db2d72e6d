"""One HTML page of everything recorded: it opens from disk, needs no network, and without scripts lacks its charts."""

import base64
import functools
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError
from benchmark.files import check_replaceable, read_regular, reason, refuse_link, write_text
from benchmark.records.environment import commit_days
from benchmark.records.grouped_runs import group, read_runs
from benchmark.report import charts
from benchmark.report.boards import (
    Board,
    boards,
    headings,
    ranking,
    revision_of,
    runs_of,
    sources,
    variants,
    worst_clients,
)
from benchmark.report.gains import gains_over_alone
from benchmark.report.scored import Scored, scored_images
from benchmark.report.scored_charts import scored_charts
from benchmark.report.subgroup_tables import subgroup_tables
from benchmark.report.table_pages import TablePage, table_page
from benchmark.shipped import SHIPPED
from benchmark.tables.paper import read_paper

if TYPE_CHECKING:  # an extra
    from jinja2 import Template

RESULTS = Path("results")
LARGEST_FIGURE, LARGEST_CAPTION = 2**25, 2**16
EXTRA = "the report needs Jinja2 and vl-convert-python: pip install 'federated-prompt-benchmark[report]'"


@dataclass(frozen=True)
class Page:
    """Say what was written.

    Attributes:
        path: of the page.
        runs: how many it shows.
        tables: how many it shows.
        problems: what could not be read, one sentence each.
        again: which runs are left out, since a run of the same seed is shown, one sentence each.
    """

    path: Path
    runs: int
    tables: int
    problems: list[str]
    again: list[str]


def write_report(path: Path, results_dir: Path = RESULTS, runs_dir: Path | None = None) -> Page:
    """Write the page from ``results_dir/runs``, ``tables``, ``paper`` and ``figures``, and a further folder of runs.

    The same files give the same page. Without a ``paper``, the published numbers are those that came with the code.

    Runs and tables that are damaged are left out, and of runs of one seed all but the first; the page and the answer
    list them.

    Raises:
        ConfigurationError: ``results_dir`` or ``runs_dir`` is no folder (without the usual ``results``, ``runs_dir`` is
            enough), a link stands for what lies in ``results_dir``, the page cannot be written where it should, or what
            makes it is not installed.
    """
    optional = runs_dir is not None and results_dir == RESULTS
    for folder in (*([] if optional else [results_dir]), *([runs_dir] if runs_dir else [])):
        if not folder.is_dir():
            raise ConfigurationError(
                f"{folder} is no folder; start the command in the repository's root, or name with --results_dir the "
                "folder that has `runs` in it"
            )
    for name in ("runs", "tables", "paper", "figures"):
        refuse_link(results_dir / name)
    _check_writable(path)
    template, scripts = _template()
    folders = [*([runs_dir] if runs_dir else []), results_dir / "runs"]
    runs, problems, again = read_runs(folders)
    published = results_dir / "paper" if (results_dir / "paper").is_dir() else SHIPPED / "results" / "paper"
    paper = read_paper([str(each) for each in sorted(published.glob("*.csv"))])
    tables = _tables(results_dir / "tables", problems)
    days = commit_days(revision_of(run) for run in runs)
    found = boards(group(runs))
    places = [
        _place(board, heading, paper, days, problems) for board, heading in zip(found, headings(found), strict=True)
    ]
    kinds = [
        ("leaderboard", "Leaderboard", [place for place in places if not place["board"].first.demo]),
        ("demo", "Demo", [place for place in places if place["board"].first.demo]),
    ]
    content = template.render(
        runs=runs,
        methods=len({run.record.method for run in runs}),
        data_sets=len({run.dataset for run in runs}),
        demo_runs=sum(run.demo for run in runs),
        kinds=[kind for kind in kinds if kind[2]] or kinds[:1],
        runs_read=" and ".join(folder.as_posix() for folder in folders if folder.is_dir()),
        tables_read=(results_dir / "tables").as_posix(),
        tables=tables,
        figures=_figures(results_dir / "figures", problems),
        problems=problems,
        again=again,
        **scripts,
    )
    write_text(path, content)
    return Page(path, len(runs), len(tables), problems, again)


def _template() -> "tuple[Template, dict[str, str]]":
    """The page's template, and what is written into it as it is: our style and script and Vega-Lite's.

    Raises:
        ConfigurationError: the libraries are not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        library = _vega_lite()
    except ImportError as error:
        raise ConfigurationError(EXTRA) from error
    folder = Path(__file__).with_name("template")
    jinja = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    scripts = {name: (folder / file).read_text() for name, file in (("style", "style.css"), ("script", "script.js"))}
    return jinja.get_template("page.html"), {**scripts, "library": library}


@functools.cache
def _vega_lite() -> str:
    """The library that draws the charts, as JavaScript."""
    from vl_convert import javascript_bundle

    return javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _place(board: Board, heading: str, paper: Any, days: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    """Return what the template shows of a board; ``problems`` gets a sentence for kept images that cannot be read."""
    kept = _kept_images(board, problems)
    images = scored_charts(kept)
    drawn = {
        "Learning curves": charts.curves(board),
        "Clients": charts.clients(board),
        "Communication": charts.costs(board),
        "Partition": charts.partition(board),
    }
    return {
        "board": board,
        "heading": heading,
        "ranking": ranking(board, paper),
        "sources": sources(board, paper),
        "variants": variants(board),
        "runs": runs_of(board, days),
        "worst": worst_clients(board),
        "gains": gains_over_alone(board),
        "charts": drawn,
        "kept": kept,
        "unkept": _unkept(board),
        "images": images,
        "subgroups": subgroup_tables(kept),
        "specs": [chart.spec for part in (*drawn.values(), images) for chart in part],
    }


def _kept_images(board: Board, problems: list[str]) -> list[Scored]:
    found = []
    for name, run in [(each.name, run) for each in board.experiments for run in each.runs]:
        try:
            found += scored_images(name, run)
        except ConfigurationError as error:
            problems.append(str(error))
    return found


def _unkept(board: Board) -> list[str]:
    """Return the names of experiments that have clinical metrics and were told to keep no image."""
    return [
        each.name
        for each in board.experiments
        if each.first.get("data.keep_predictions") == "none" and each.first.get("data.metrics") is not None
    ]


def _tables(folder: Path, problems: list[str]) -> list[TablePage]:
    """The tables of a folder; what is none is told in ``problems``."""
    tables = []
    for path in sorted(folder.glob("*.csv")):
        try:
            tables.append(table_page(path))
        except ConfigurationError as error:
            problems.append(str(error))
    return tables


def _figures(folder: Path, problems: list[str]) -> Sequence[dict[str, str]]:
    """The PNGs of a folder in the order of their numbers; a text file of the same name is the caption.

    What cannot be read is told in ``problems``.
    """
    found = []
    for path in sorted(folder.glob("*.png"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.stem)]):
        words, text = path.stem.replace("_", " "), path.with_suffix(".txt")
        try:
            caption = read_regular(text, LARGEST_CAPTION).decode().strip() if os.path.lexists(text) else ""
            content = base64.b64encode(read_regular(path, LARGEST_FIGURE)).decode()
        except (OSError, UnicodeError) as error:
            problems.append(f"{path} and its caption cannot be read: {reason(error)}")
            continue
        named = re.search(r"Fig\. \d+ of \w+", caption)
        heading = f"{named[0]}, {path.stem.rpartition('_')[2]}" if named else words[:1].upper() + words[1:]
        found.append({"heading": heading, "caption": caption, "says": caption or words, "png": content})
    return found


def _check_writable(path: Path) -> None:
    """Make the folder of a file, and refuse a place where it cannot be written, before there is work to lose.

    Raises:
        ConfigurationError: as it says.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            check_replaceable(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigurationError(
            f"the page cannot be written to {path}: {reason(error)}; give a file in a folder that can be written to"
        ) from error
