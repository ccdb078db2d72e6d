"""Tables of subgroups of kept images, such as patients of one sex, for the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from benchmark.records.group_fairness import Entry, GroupFairness, Lines, metric_lines, sensitivity_lines
from benchmark.report.grid import Grid, GridCell, grid
from benchmark.report.scored import Scored


@dataclass(frozen=True)
class SubgroupTables:
    """Tables of one column, of one run at one point of a round.

    Attributes:
        heading: above them.
        metrics: of each subgroup, and statistics over subgroups.
        sensitivities: of each subgroup and class, and their gaps; None for many classes.
        remarks: sentences on values that are not to be compared, or not there.
    """

    heading: str
    metrics: Grid
    sensitivities: Grid | None
    remarks: Sequence[str]


def subgroup_tables(kept: Sequence[Scored]) -> list[SubgroupTables]:
    """Return the tables of a board's kept images; none where no run kept subgroups."""
    return [tables for each in kept for tables in _of(each)]


def _of(scored: Scored) -> Iterator[SubgroupTables]:
    for of in scored.subgroups:
        heading = f"{of.column}: {scored.label}"
        metrics = metric_lines(of)
        metrics = metrics._replace(heads=[head[:1].upper() + head[1:] for head in metrics.heads])
        lines = sensitivity_lines(of)
        sensitivities = None if lines is None else _grid(f"Sensitivity by {heading}", lines, of)
        yield SubgroupTables(heading, _grid(f"Test images by {heading}", metrics, of), sensitivities, [*of.remarks])


def _grid(label: str, lines: Lines, of: GroupFairness) -> Grid:
    heads = [of.column, *lines.heads[1:]]
    rows = [[_cell(entry) for entry in row] for part in lines.parts for row in part]
    return replace(grid(label, heads, rows), sorts=False)


def _cell(entry: Entry) -> GridCell:
    if entry.images is None:
        return GridCell(entry.text)
    return GridCell(entry.text, note=f"{entry.images:,} image{'s' * (entry.images != 1)}")
