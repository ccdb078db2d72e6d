"""Read and check a table's YAML, as in ``configs/tables/``.

Paths in a table are relative to the folder the command is started in, the repository's root::

    title: pFedPG Table 1
    paper: [results/paper/pfedpg_table1.csv]  # published numbers; `method` is a row's label
    metric: accuracy                          # of metrics.parquet; default accuracy
    split: test                               # default test
    summary: last                             # last | last10 | best_on_test; default last
    baseline: FedAvg                          # optional: a row; the others are compared with it, pair by pair
    gains: [FedVPT, Local]                    # optional: rows; for each a matrix of the others' gain over it, by group
    presets:
      paper:
        note: One sentence under the title.   # optional
        seeds: [0, 1, 2]
        rows: [FedVPT, pFedPG]                # optional; the labels of the rows that this preset runs, default all
        summary: last                         # optional; instead of the table's
        split: new                            # optional; instead of the table's
        axis: epsilon                         # optional; how the data groups differ, in their order: the picture and
                                              # the report draw each row over the groups, not over the rounds
        scale: deit_tiny_112px                # optional; of configs/scales, read after method and suite
        overrides: ["--trainer.max_epochs=100"]  # optional; as on the command line, one string each; read after the
                                              # group's data files, and before its own overrides and the row's
        data:                                 # column groups; one run gives all columns of a group
          - name: office_caltech10            # [a-z0-9_]; part of run directories
            label: Office-Caltech10           # heading
            suite: office_vit                 # optional; of configs/suites, for the rows that name a method
            data: [sources/cifar10, partitions/disjoint_classes]  # optional; of configs, instead of the suite's
            panel: Domains                    # optional; groups of one panel stand side by side under this heading
            configs: [configs/base.yaml]      # optional; read before method and suite
            overrides: ["--data.source.init_args.root={data_dir}"]  # {data_dir}: the folder given by --data_dir
            columns:                          # default: every client, then the average
              - {client: amazon, label: A, paper: {dataset: Office-Caltech10, setting: domain=A}}
              - {client: "*"}                 # one column per client, named as in the record
              - {statistic: average, label: Avg, paper: {dataset: Office-Caltech10, setting: avg over domains}}
                # statistic: average | worst | std | by_data_set | ...; `paper` may name metric (default accuracy)
                # and backbone (needed where the CSV has several). No `paper`: no published number, no difference.
              - {statistic: average, label: F1, metric: macro_f1}  # another metric or split than the table's
              - {statistic: average, metric: sensitivity, of_class: melanoma}  # or specificity, ppv, npv, auroc, ap
                # of a class, by name or label, in the last round; the runs need --data.metrics=clinical
              - {statistic: lowest_gain, over: FedAvg}  # mean_gain | lowest_gain | better_off | worse_off: of clients
                # over a row with the same seed and partition, by default the row Local
              - {label: HM, harmonic: [Local, Base, Novel]}        # of columns further left
            cost: {dataset: both, setting: communication cost, metric: params per round}  # optional: floats one way
    rows:
      - label: pFedPG                         # the paper's name of the method
        method: pfedpg                        # optional; configs/methods/pfedpg.yaml here, else of those that come with
                                              # the code, read with the group's suite
        name: pfedpg_slow                     # [a-z0-9_]; part of run directories, default: method; a row of configs
                                              # alone needs one
        configs: [configs/x.yaml]             # optional; read last
        overrides: {paper: ["--model.init_args.training.lr=0.1"]}  # optional; per preset
        search: {paper: {model.init_args.training.lr: [0.1, 0.3]}}  # optional; per preset, what `benchmark tune` tries
                                              # instead of the search space of the row's files
        without: [model.init_args.training]   # optional; options of presets and data groups, and all below them, that
                                              # this row is not given: a floor does not train
        point: local                          # server | local: where the row's number is read
        also: {generated prompts: server}     # optional; further readings of the same run, below it

A *cell* is one run: row x data x seed. Its directory is ``<row>-<data>-s<seed>-<hash>``, where the hash is of the
options that configs and overrides give together. So a finished cell is never run again, not by another table and not
for a file that was reorganised; a killed one continues from its checkpoint (:mod:`benchmark.cells.queue`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, with_config

from benchmark.config.class_names import Named, check_names, names_in_files
from benchmark.config.given_options import check_override, given_options
from benchmark.config.yaml_files import as_declared, read_mapping
from benchmark.errors import ConfigurationError
from benchmark.metrics import GAINS, METRICS, STATISTICS, pooled_by
from benchmark.own_metrics import know_declared
from benchmark.records.class_values import check_class_column
from benchmark.shipped import shipped, table_file

#: Label of the row that gains are over where a column names none.
ALONE = "Local"

Point = Literal["server", "local"]
Summary = Literal["last", "last10", "best_on_test"]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class PaperNumber:
    """Published number that stands beside a column: columns ``dataset``, ``setting``, ... of the paper's CSV."""

    dataset: str
    setting: str
    metric: str = "accuracy"
    backbone: str | None = None


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Column:
    """One client (``"*"``: every client), a statistic over clients, or the harmonic mean of columns to the left."""

    label: str | None = None
    client: str | None = None
    statistic: str = "average"
    over: str | None = None
    metric: str | None = None
    split: str | None = None
    of_class: str | None = None
    harmonic: list[str] = field(default_factory=list)
    paper: PaperNumber | None = None

    @property
    def heading(self) -> str:
        """The label, or what stands in its place."""
        of_gains = GAINS.get(self.statistic)
        statistic = of_gains.heading + f" over {self.over}" * bool(self.over) if of_gains else ""
        of = f", {self.of_class}" if self.of_class else ""
        plain = "HM" if self.harmonic else self.client or statistic or STATISTICS[self.statistic].heading
        return self.label or plain + of

    @property
    def gains_over(self) -> str | None:
        """Return the label of the row that clients' gains are over; None of a column that shows no gains."""
        return (self.over or ALONE) if self.statistic in GAINS and not self.harmonic and self.client is None else None


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class DataGroup:
    """One data set and partition, and the columns that a run on it fills."""

    name: str
    label: str
    configs: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    columns: list[Column] = field(default_factory=lambda: [Column(client="*"), Column(statistic="average")])
    cost: PaperNumber | None = None
    panel: str | None = None
    suite: str | None = None
    data: list[str] = field(default_factory=list)


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Preset:
    """At which size, on which data, and with which seeds a table is made."""

    data: list[DataGroup]
    seeds: list[int]
    scale: str | None = None
    overrides: list[str] = field(default_factory=list)
    note: str = ""
    rows: list[str] = field(default_factory=list)
    summary: Summary | None = None
    split: str | None = None
    axis: str | None = None

    def called(self, group: DataGroup) -> str:
        """The label of one of its data groups, with the panel's where groups of several panels have one label."""
        labels = {entry.label for entry in self.data}
        return group.label if len(labels) == len(self.data) else f"{group.panel}, {group.label}"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Row:
    """One method."""

    label: str
    point: Point
    name: str | None = None
    method: str | None = None
    configs: list[str] = field(default_factory=list)
    also: dict[str, Point] = field(default_factory=dict)
    overrides: dict[str, list[str]] = field(default_factory=dict)
    search: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)

    def takes(self, override: str) -> bool:
        """Return whether it is given this override of a preset or of a data group."""
        return not any(_sets(override, name) for name in self.without)

    @property
    def prefix(self) -> str:
        """The first part of its run directories' names."""
        return self.name or self.method or ""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True)
class Table:
    """A table's YAML; the keys are explained at the top of this file."""

    title: str
    presets: dict[str, Preset]
    rows: list[Row]
    paper: list[str] = field(default_factory=list)
    metric: str = "accuracy"
    split: str = "test"
    summary: Summary = "last"
    baseline: str | None = None
    gains: list[str] = field(default_factory=list)

    @property
    def baselines(self) -> list[str]:
        """Labels of the rows that others are compared with, each once."""
        return list(dict.fromkeys([*([self.baseline] if self.baseline else []), *self.gains]))


def load_table(name: str) -> Table:
    """Read ``configs/tables/<name>.yaml``, or the YAML file ``name``, and check it.

    Raises:
        ConfigurationError: no such table, an unknown or missing key, a value of the wrong type.
    """
    path = table_file(name)
    table = as_declared(Table, read_mapping(path), f"{path} is not a table")
    _check_table(table, path)
    return table


def preset_of(table: Table, name: str, preset: str) -> Preset:
    """A preset of the table that was read under this name.

    Raises:
        ConfigurationError: there is none of this name.
    """
    if preset not in table.presets:
        raise ConfigurationError(f"table {name} has no preset {preset!r}; it has {', '.join(table.presets)}")
    return table.presets[preset]


def _sets(override: str, name: str) -> bool:
    """Return whether an override sets this option, or one below it."""
    option = override.removeprefix("--").partition("=")[0]
    return option == name or option.startswith(f"{name}.")


def rows_of(table: Table, preset: Preset) -> list[Row]:
    """The rows that a preset runs."""
    return [row for row in table.rows if not preset.rows or row.label in preset.rows]


def overrides_of(row: Row, preset_name: str, preset: Preset, group: DataGroup) -> tuple[str, ...]:
    """The overrides of a row on a data group, in their order: later ones win. Files of data come before all options."""
    files = [f"--data=configs/{name}.yaml" for name in group.data]
    files += [entry for entry in group.overrides if entry.startswith("--data=")]
    options = [entry for entry in group.overrides if entry not in files]
    common = (entry for entry in (*files, *preset.overrides, *options) if row.takes(entry))
    return (*common, *row.overrides.get(preset_name, ()))


def check_classes(name: str, preset_name: str) -> None:
    """Refuse a class of the suite that there is not in the files and options of a preset's runs; imports none.

    Args:
        name: of the table, as :func:`load_table` takes it.
        preset_name: of one of its presets.

    Raises:
        ConfigurationError: no such table, preset or class; names what is like it.
    """
    table = load_table(name)
    preset = preset_of(table, name, preset_name)
    rows = rows_of(table, preset)
    methods = [f"configs/methods/{row.method}.yaml" for row in rows if row.method is not None]
    suites = [f"configs/suites/{group.suite}.yaml" for group in preset.data if group.suite is not None]
    own = [config for each in preset.data for config in each.configs] + [
        config for row in rows for config in row.configs
    ]
    files = dict.fromkeys([*methods, *suites, *own])
    lists = [preset.overrides, *(group.overrides for group in preset.data)]
    lists += [row.overrides.get(preset_name, []) for row in rows]
    options = (entry.removeprefix("--").partition("=") for entries in lists for entry in entries)
    check_names(
        [*(named for file in files for named in names_in_files([Path(file)]))]
        + [Named(value, option) for option, _, value in options if value]
    )


def _know_own_metrics(table: Table) -> None:
    """Make metrics of the user's own known that the configurations of a table declare, where it reads one.

    Raises:
        ConfigurationError: one cannot be imported, or is not declared as it should be.
    """
    groups = [group for preset in table.presets.values() for group in preset.data]
    read = {table.metric, *(column.metric or table.metric for group in groups for column in group.columns)}
    if not read - METRICS.keys():
        return
    for name, preset in table.presets.items():
        for group, row in product(preset.data, rows_of(table, preset)):
            options = given_options([*group.configs, *row.configs], overrides_of(row, name, preset, group))
            know_declared(options.get("data", {}).get("metrics"))


def _check_table(table: Table, path: Path) -> None:
    groups = [group for preset in table.presets.values() for group in preset.data]
    if nameless := [row.label for row in table.rows if not row.prefix]:
        raise ConfigurationError(
            f"{path}: the row {nameless[0]!r} names no method: give it a name, as its runs have it"
        )
    for name in [row.prefix for row in table.rows] + [group.name for group in groups]:
        if not re.fullmatch(r"[a-z0-9_]+", name):
            raise ConfigurationError(f"{path}: the name {name!r} is part of a directory's: use a-z, 0-9 and _ only")
    labels = [row.label for row in table.rows]
    if not labels or not table.presets:
        raise ConfigurationError(f"{path}: a table needs at least one row and one preset")
    if len(set(labels)) < len(labels):
        raise ConfigurationError(f"{path}: two rows have the same label")
    overrides = [
        *(entry for preset in table.presets.values() for entry in preset.overrides),
        *(entry for group in groups for entry in group.overrides),
        *(entry for row in table.rows for entries in row.overrides.values() for entry in entries),
    ]
    for entry in overrides:
        check_override(entry, f"{path}: ")
    _know_own_metrics(table)
    for preset_name, preset in table.presets.items():
        if not preset.data:
            raise ConfigurationError(f"{path}: the preset {preset_name} needs at least one data group")
        check_seeds(preset.seeds, f"{path}, preset {preset_name}: ")
        if unknown := sorted(set(preset.rows) - set(labels)):
            raise ConfigurationError(f"{path}: the preset {preset_name} names {unknown[0]!r}, which is no row's label")
        if len({group.name for group in preset.data}) < len(preset.data):
            raise ConfigurationError(f"{path}: two data groups of the preset {preset_name} have the same name")
        if len({(group.panel, group.label) for group in preset.data}) < len(preset.data):
            raise ConfigurationError(
                f"{path}: two data groups of the preset {preset_name} have the same panel and label"
            )
        for group in preset.data:
            _check_class_columns(table, preset, group, f"{path}, preset {preset_name}, {group.label}: ")
            _check_splits(table, preset, group, f"{path}, preset {preset_name}, {group.label}: ")
            _check_gains(table, preset, group, f"{path}, preset {preset_name}, {group.label}: ")
    for row in table.rows:
        if row.method is None and not row.configs:
            raise ConfigurationError(f"{path}: row {row.label} names no method of configs/methods and no configs")
        if row.method and (bare := next((group.name for group in groups if group.suite is None), None)):
            raise ConfigurationError(
                f"{path}: row {row.label} names a method, and the data group {bare} no suite for it"
            )
        _check_without(table, row, path)
        for kind, given in (("overrides", row.overrides), ("search", row.search)):
            if unknown := sorted(set(given) - set(table.presets)):
                raise ConfigurationError(f"{path}: row {row.label} has {kind} for {unknown[0]}, which is no preset")
    for group in groups:
        _check_columns(table, group, path)
        for name in group.data:
            if not shipped(f"configs/{name}.yaml").is_file():
                raise ConfigurationError(
                    f"{path}: the data group {group.name} names {name!r}; there is no configs/{name}.yaml"
                )
    check_baseline(table, path)


def _check_without(table: Table, row: Row, path: Path) -> None:
    """Refuse options to leave out that the row is not given anyway."""
    presets = [preset for preset in table.presets.values() if row in rows_of(table, preset)]
    lists = [entries for preset in presets for entries in (preset.overrides, *(each.overrides for each in preset.data))]
    for name in row.without:
        if not any(_sets(entry, name) for entries in lists for entry in entries):
            raise ConfigurationError(
                f"{path}: row {row.label} is to be without {name!r}, which no preset that runs it and no group sets"
            )


def _check_splits(table: Table, preset: Preset, group: DataGroup, where: str) -> None:
    """Refuse what no run has: a best round or a pooled number but of test images, new clients but at the server."""
    own, summary = preset.split or table.split, preset.summary or table.summary
    local = next((row.label for row in rows_of(table, preset) if "local" in (row.point, *row.also.values())), None)
    of_columns = [(column.split or own, column.metric or table.metric, column.statistic) for column in group.columns]
    for split, metric, statistic in [(own, table.metric, None), *of_columns]:
        if split != "test" and summary == "best_on_test":
            raise ConfigurationError(f"{where}the best round is one on test images, and the split {split} is read")
        if statistic == "pooled" and not pooled_by(metric, split):
            by_images = ", ".join(name for name, each in METRICS.items() if each.pooled == "images")
            by_counts = ", ".join(name for name, each in METRICS.items() if each.pooled == "counts")
            raise ConfigurationError(
                f"{where}{by_images} on test images alone is pooled, and {by_counts} on all; {metric} on {split} is not"
            )
        if split == "new" and local is not None:
            raise ConfigurationError(
                f"{where}clients that never train are scored at the point server alone, and the row {local} is read at "
                "local, too"
            )


def _check_class_columns(table: Table, preset: Preset, group: DataGroup, where: str) -> None:
    """Refuse values of a class that no run has: of other metrics or statistics, or of other rounds than the last."""
    for column in (each for each in group.columns if each.of_class is not None):
        check_class_column(column.metric or table.metric, column.statistic, where)
        if column.harmonic or (preset.summary or table.summary) != "last":
            raise ConfigurationError(
                f"{where}of_class is of the last round's images; give summary: last and no harmonic"
            )


def _check_gains(table: Table, preset: Preset, group: DataGroup, where: str) -> None:
    """Refuse gains over a row that the preset does not run, and a row for a column without gains."""
    labels = [row.label for row in rows_of(table, preset)]
    for column in group.columns:
        if column.client is not None and column.statistic != "average":
            raise ConfigurationError(
                f"{where}a column of client {column.client!r:.80} shows its own value, not {column.statistic} over "
                "clients; leave one of the two out"
            )
        over = column.gains_over
        if over is not None and over not in labels:
            raise ConfigurationError(
                f"{where}{column.statistic} is over the row {over!r}, which is not run here; give over: one of "
                f"{', '.join(labels)}"
            )
        if column.over is not None and over is None:
            raise ConfigurationError(
                f"{where}over: {column.over!r:.80} is for the statistics {', '.join(GAINS)}; leave it out"
            )


def check_seeds(seeds: Sequence[int], where: str = "") -> None:
    if not seeds or not all(0 <= seed < 2**32 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ConfigurationError(
            f"{where}seeds are at least one seed, different integers from 0 to {2**32 - 1}, got {list(seeds)}"
        )


def refuse_equal_headings(headings: Sequence[str], where: str) -> None:
    """Refuse columns that would write over each other's numbers."""
    if twice := [heading for heading in headings if headings.count(heading) > 1]:
        raise ConfigurationError(f"{where} has two columns called {twice[0]!r}: give one another label")


def _check_columns(table: Table, group: DataGroup, path: Path) -> None:
    left: list[str] = []
    for column in group.columns:
        if column.statistic not in STATISTICS | GAINS:
            raise ConfigurationError(
                f"{path}: there is no statistic {column.statistic!r:.80}; statistics are "
                f"{', '.join([*STATISTICS, *GAINS])}"
            )
    refuse_equal_headings([column.heading for column in group.columns], f"{path}: {group.name}")
    for column in group.columns:
        metric = column.metric or table.metric
        if metric not in METRICS:
            raise ConfigurationError(f"{path}: there is no metric {metric}; metrics are {', '.join(METRICS)}")
        missing = [label for label in column.harmonic if label not in left]
        if missing:
            raise ConfigurationError(f"{path}: no column {missing[0]!r} stands left of the harmonic mean that names it")
        if column.label is not None and column.gains_over is None:
            left.append(column.label)


def check_baseline(table: Table, path: Path | str) -> None:
    labels = [row.label for row in table.rows]
    if unknown := [name for name in table.baselines if name not in labels]:
        raise ConfigurationError(f"{path}: the baseline {unknown[0]!r} is no row; rows are {', '.join(labels)}")
