"""``results/REPRODUCTION.md``: every published table, and what was run of it here.

What is written by hand stands in ``results/REPRODUCTION.template.md``. A line ``{{table NAME}}`` there is replaced by
what the records and tables say about ``results/paper/NAME.csv``, ``{{summary}}`` by one line for each published table.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.errors import ConfigurationError
from benchmark.files import write_text
from benchmark.metrics import STATISTICS
from benchmark.records.grouped_runs import Experiment, group, read_runs
from benchmark.records.words import POINT_WORDS, ROUND_WORDS
from benchmark.report.published import READINGS, beside
from benchmark.report.readings import hardware_of, statistic_of
from benchmark.shipped import shipped
from benchmark.tables.frame import read_long_frame
from benchmark.tables.layout import Table, load_table
from benchmark.tables.paper import read_paper, table_title

if TYPE_CHECKING:
    import pandas as pd

TEMPLATE = "REPRODUCTION.template.md"


@dataclass(frozen=True)
class _Published:
    """One published table and which tables of ours are after it."""

    name: str
    numbers: "pd.DataFrame"
    tables: dict[str, Table]

    @property
    def title(self) -> str:
        first = self.numbers.iloc[0]
        return table_title(str(first["paper"]), str(first["table"]))


def _read_published(results: Path, tables_dir: Path) -> list[_Published]:
    tables = {path.stem: load_table(str(path)) for path in sorted(tables_dir.glob("*.yaml"))}
    found = []
    for path in sorted((results / "paper").glob("*.csv"), key=lambda path: _natural(path.stem)):
        after = {
            name: table for name, table in tables.items() if any(Path(entry).name == path.name for entry in table.paper)
        }
        found.append(_Published(path.stem, read_paper([str(path)]), after))
    return found


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _csv(results: Path, table: str, preset: str) -> Path:
    return results / "tables" / f"{table}_{preset}.csv"


def _distance(frame: "pd.DataFrame") -> str:
    """Summarize the differences between a table's numbers and the paper's, in a sentence."""
    compared = frame[frame["difference"].notna()]
    if not len(compared):
        return "no number of it stands beside a published one"
    gaps = compared["difference"]
    worst = compared.iloc[int(gaps.abs().argmax())]
    return (
        f"{len(compared)} numbers beside the paper's: mean difference {gaps.mean():+.2f}, mean distance "
        f"{gaps.abs().mean():.2f}, farthest {worst['method']}, {worst['dataset']}, {worst['column']}: "
        f"{worst['ours']:.2f} against {worst['paper']:.2f}"
    )


def _table_lines(results: Path, published: _Published) -> list[str]:
    """Return a line for each preset of our tables after this published one: its results, or that it was not run."""
    lines = []
    for name, table in published.tables.items():
        for preset_name, preset in table.presets.items():
            command = f"`benchmark table {name} --preset {preset_name}`"
            path = _csv(results, name, preset_name)
            if not path.is_file():
                lines.append(f"- {command}: **not run yet**.")
                continue
            frame = read_long_frame(path).query("kind == 'column'")
            failed = len(frame.loc[frame["error"] != "", ["dataset", "method", "reading"]].drop_duplicates())
            missing = f" {failed} of its lines have failed runs." if failed else ""
            files = f"[results](tables/{path.stem}.md)"
            rounds = ", ".join(dict.fromkeys(value for value in frame["rounds"] if value))
            seeds = int(frame["seeds"].fillna(0).max())
            scale = f"{seeds} seed{'' if seeds == 1 else 's'}, {rounds} rounds"
            note = f" {preset.note}" if preset.note else ""
            lines.append(f"- {command} ({scale}): {files}; {_distance(frame)}.{note}{missing}")
    return lines


def _reported(published: _Published) -> tuple[str, str]:
    """Over what and when the paper takes its accuracy; where it is no plain one, in the last round over clients."""
    return next((READINGS[metric] for metric in published.numbers["metric"] if metric in READINGS), ("average", "last"))


def _readings(experiment: Experiment, reported: tuple[str, str]) -> str:
    """Test accuracy over seeds at the points where it was read: first as the paper takes it, then of the last round."""
    said = []
    for statistic, which in dict.fromkeys([reported, ("average", "last"), ("pooled", "last")]):
        found = []
        for point, words in POINT_WORDS.items():
            known = statistic_of(experiment, point, which, statistic)
            values = [value for value in known if value is not None]
            if values and len(values) == len(known):
                found.append(f"{math.fsum(values) / len(values):.2f} {words}")
        if found:
            said.append(f"{STATISTICS[statistic].reading}, {ROUND_WORDS[which]}: {', '.join(found)}")
    return "; ".join(said) or "not evaluated on test data"


def _run_lines(experiments: Sequence[Experiment], published: _Published) -> list[str]:
    """Runs with a published number's data set, setting and method, at whatever scale they were."""
    lines = []
    for experiment in experiments:
        run = experiment.first
        rows = beside(run, published.numbers)
        if not len(rows) or run.demo:
            continue
        theirs = ", ".join(
            f"{row.value:.2f}" + (f" ({row.backbone})" if str(row.backbone) not in ("", "nan") else "")
            for row in rows.itertuples()
        )
        work = f", {run.local_work}" if run.local_work else ""
        seeds = f"seed {run.record.seed}" if len(experiment.runs) == 1 else f"{len(experiment.runs)} seeds"
        minutes = sum(each.record.seconds["total"] for each in experiment.runs) / 60
        columns = [
            experiment.name,
            f"{run.dataset}, {run.setting}",
            f"{run.backbone}, {run.record.rounds_trained} rounds{work}, {seeds}",
            _readings(experiment, _reported(published)),
            theirs,
            f"{'; '.join(dict.fromkeys(map(hardware_of, experiment.runs)))}, {minutes:.0f} min",
            f"`{run.folder.name}`",
        ]
        lines.append(f"| {' | '.join(columns)} |")
    return lines


def _statistics_only(published: _Published) -> bool:
    return set(published.numbers["setting"]) == {"dataset statistics"}


def _block(results: Path, published: _Published, experiments: Sequence[Experiment]) -> str:
    numbers = published.numbers
    methods, settings = numbers["method"].nunique(), numbers[["dataset", "setting"]].drop_duplicates()
    source = f"[{published.name}.csv](paper/{published.name}.csv)"
    if _statistics_only(published):
        return f"{len(numbers)} sizes of data sets ({source}); nothing to run."
    statistic, which = _reported(published)
    read = f"The paper's accuracy is {STATISTICS[statistic].reading}; compared with ours of the {ROUND_WORDS[which]}."
    lines = [
        f"{len(numbers)} numbers, {methods} method{'s' if methods != 1 else ''}, {len(settings)} settings ({source})."
        + f" {read}" * bool(published.tables)
    ]
    tables = _table_lines(results, published)
    runs = _run_lines(experiments, published)
    lines += ["", *(tables or ["- No table of this project is after it yet: **not run**."])]
    if runs:
        lines += ["", "Single runs with the same method, data and kind of partition, at another scale:", ""]
        lines += [
            "| method | data | scale | ours | paper | hardware | record in `runs/` |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += runs
    return "\n".join(lines)


def _summary(results: Path, published: Sequence[_Published], experiments: Sequence[Experiment]) -> str:
    lines = [
        "| published table | numbers | paper's setting | other presets | single runs nearby |",
        "|---|---|---|---|---|",
    ]
    for each in published:
        if _statistics_only(each):
            lines.append(f"| {each.title} | {len(each.numbers)} sizes | nothing to run | | |")
            continue
        made = {
            (name, preset): _csv(results, name, preset).is_file()
            for name, table in each.tables.items()
            for preset in table.presets
        }
        of_paper = [done for (_, preset), done in made.items() if preset == "paper"]
        state = "run" if of_paper and all(of_paper) else "not run yet" if of_paper else "no table yet"
        others = ", ".join(
            f"{preset} {'run' if done else 'not run yet'}" for (_, preset), done in made.items() if preset != "paper"
        )
        nearby = len(_run_lines(experiments, each))
        lines.append(f"| {each.title} | {len(each.numbers)} | {state} | {others} | {nearby or 'none'} |")
    return "\n".join(lines)


def write_notes(results_dir: Path = Path("results"), tables_dir: Path | None = None) -> Path:
    """Write ``REPRODUCTION.md`` from the template beside it, the tables and the kept records.

    Args:
        results_dir: of the template, ``paper``, ``tables`` and ``runs``.
        tables_dir: of the tables' YAML files; default ``configs/tables`` here, else those that came with the code.

    Raises:
        ConfigurationError: no template, a table of it that does not exist, or a published table that it leaves out.
    """
    tables_dir = shipped("configs/tables") if tables_dir is None else tables_dir
    template = results_dir / TEMPLATE
    if not template.is_file():
        raise ConfigurationError(f"{template} is missing; start the command in the repository's root")
    published = {each.name: each for each in _read_published(results_dir, tables_dir)}
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(f"{template} cannot be read: {error}") from error
    named = re.findall(r"^\{\{table (\w+)\}\}$", text, re.MULTILINE)
    wrong = sorted(set(named) ^ set(published))
    if wrong or len(named) != len(set(named)):
        raise ConfigurationError(
            f"{template} must name every table of {results_dir / 'paper'} once, as {{{{table NAME}}}}; "
            f"missing, unknown or twice: {', '.join(wrong or sorted(named))}"
        )
    runs, problems, _ = read_runs([results_dir / "runs"])  # a run that two tables kept counts once
    if problems:
        raise ConfigurationError(problems[0])
    experiments = group(runs)
    for name, each in published.items():
        text = text.replace(f"{{{{table {name}}}}}", _block(results_dir, each, experiments))
    text = text.replace("{{summary}}", _summary(results_dir, list(published.values()), experiments))
    path = results_dir / "REPRODUCTION.md"
    note = f"<!-- Made by `benchmark reproduction` from {TEMPLATE}: change that, not this. -->\n"
    write_text(path, note + text)
    return path
