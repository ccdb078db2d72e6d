"""One HTML page of everything recorded: it opens from disk, needs no network, and works without scripts."""

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.files import write_text
from benchmark.records.grouped_runs import Experiment, Run, group, read_runs
from benchmark.report.html import anchor_of, figure, picture, tag
from benchmark.report.leaderboard import leaderboard
from benchmark.report.places import place_page
from benchmark.report.readings import points_of
from benchmark.report.table_pages import table_page


@dataclass(frozen=True)
class Page:
    """What was written.

    Attributes:
        path: of the page.
        runs: how many it shows.
        tables: how many it shows.
        problems: what could not be read, one sentence each.
    """

    path: Path
    runs: int
    tables: int
    problems: list[str]


@dataclass(frozen=True)
class _Section:
    anchor: str
    heading: str
    body: str
    nav: str  # the anchor in the navigation that it belongs to


def write_report(path: Path, results_dir: Path = Path("results"), runs_dir: Path | None = None) -> Page:
    """Write the page from ``results_dir/runs``, ``tables`` and ``figures``, and a further folder of runs.

    The same files give the same page.

    Runs and tables that are damaged are left out, listed on the page and in the answer.

    Raises:
        ConfigurationError: ``results_dir`` or ``runs_dir`` is no folder, or the page cannot be written where it should.
    """
    for folder in (results_dir, *([runs_dir] if runs_dir else [])):
        if not folder.is_dir():
            raise ConfigurationError(f"{folder} is no folder; start the command in the repository's root")
    _check_writable(path)
    runs, problems = read_runs([results_dir / "runs", *([runs_dir] if runs_dir else [])])
    sections = _sections(results_dir, runs, problems)
    named = {"leaderboard": "Leaderboard", "data": "Data", "tables": "Tables", "figures": "Figures"}
    nav = "".join(f'<li><a href="#{anchor}">{label}</a></li>' for anchor, label in named.items())
    body = "\n".join(
        f'<section id="{s.anchor}" data-nav="{s.nav}"><h2>{escape(s.heading)}</h2>{s.body}</section>' for s in sections
    )
    template = resources.files("benchmark.report") / "template"
    page = (template / "page.html").read_text()
    lead = _lead(runs, sum(s.nav == "tables" for s in sections) - 1) + _left_out(problems)
    for mark, content in [
        ("/*STYLE*/", (template / "style.css").read_text()),
        ("/*SCRIPT*/", (template / "script.js").read_text()),
        ("<!--LEAD-->", lead),
        ("<!--NAV-->", nav),
        ("<!--SECTIONS-->", body),
    ]:
        page = page.replace(mark, content, 1)
    write_text(path, page)
    return Page(path, len(runs), sum(s.nav == "tables" for s in sections) - 1, problems)


def _sections(results: Path, runs: Sequence[Run], problems: list[str]) -> list[_Section]:
    experiments = group(runs)
    empty = '<p class="note">There are no finished runs yet.</p>'
    sections = [
        _Section("leaderboard", "Leaderboard", leaderboard(experiments) if experiments else empty, "leaderboard")
    ]
    places: dict[tuple[str, str, str], list[Experiment]] = {}
    for each in experiments:
        if points_of(each):
            places.setdefault(each.place, []).append(each)
    links = []
    for place, part in places.items():
        anchor, demo = anchor_of("data", *place), part[0].first.demo
        links.append(f'<li><a href="#{anchor}">{escape(", ".join(place))}</a>{tag(demo)} ({len(part)} methods)</li>')
    listed = f'<ul class="list">{"".join(links)}</ul>' if links else empty
    sections.append(_Section("data", "Data and settings", f"<p>One page for each.</p>{listed}", "data"))
    for place, part in places.items():
        lead = f"<p>{escape(place[1])}; backbone {escape(place[2])}.{tag(part[0].first.demo)}</p>"
        sections.append(_Section(anchor_of("data", *place), place[0], lead + place_page(part), "data"))
    pages = []
    for path in sorted((results / "tables").glob("*.csv")):
        try:
            title, body = table_page(path)
        except ConfigurationError as error:
            problems.append(str(error))
            continue
        pages.append(_Section(anchor_of("table", path.stem), title, body, "tables"))
    listed = "".join(f'<li><a href="#{page.anchor}">{escape(page.heading)}</a></li>' for page in pages)
    listed = f'<ul class="list">{listed}</ul>' if pages else '<p class="note">No table has been made yet.</p>'
    sections.append(_Section("tables", "Tables", f"<p>After the papers' tables.</p>{listed}", "tables"))
    sections += pages
    sections.append(_Section("figures", "Figures", _figures(results / "figures"), "figures"))
    return sections


def _figures(folder: Path) -> str:
    """The PNGs of a folder; a text file of the same name is the caption."""
    shown = []
    for path in sorted(folder.glob("*.png")):
        words = path.stem.replace("_", " ")
        text = path.with_suffix(".txt")
        caption = text.read_text().strip() if text.is_file() else ""
        shown.append(figure(words[:1].upper() + words[1:], picture(path, caption or words), caption))
    return (
        f'<div class="figures">{"".join(shown)}</div>'
        if shown
        else '<p class="note">No figures have been drawn yet.</p>'
    )


def _left_out(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    entries = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    return f'<p>Damaged, and left out of this page:</p><ul class="failed">{entries}</ul>'


def _check_writable(path: Path) -> None:
    """Make the folder of a file, and refuse a place where it cannot be written, before there is work to lose.

    Raises:
        ConfigurationError: as it says.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent), contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(os.stat(path).st_mode):
                raise IsADirectoryError(errno.EISDIR, "it is a folder")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"the page cannot be written to {path}: {reason}; give a file in a folder that can be written to"
        ) from error


def _lead(runs: Sequence[Run], tables: int) -> str:
    def count(number: int, one: str, many: str) -> str:
        return f"{number} {one if number == 1 else many}"

    parts: list[tuple[Callable[[Run], str], str, str]] = [
        (lambda run: run.record.method, "method", "methods"),
        (lambda run: run.dataset, "data set", "data sets"),
    ]
    said = [count(len({of(run) for run in runs}), one, many) for of, one, many in parts]
    demo = sum(run.demo for run in runs)
    embedded = (
        f" {count(demo, 'run', 'runs')} marked demo used the embedded digits or micro models, "
        "which stand for no paper's numbers."
        if demo
        else ""
    )
    return f"<p>{count(len(runs), 'run', 'runs')}, {', '.join(said)}, {count(tables, 'table', 'tables')}.{embedded}</p>"
