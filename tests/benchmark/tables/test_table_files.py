"""The tables in ``configs/tables``: they name files that exist and numbers that were published.

The YAML is read as it is; ``load_table``, which checks it, takes seconds for the largest tables.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmark.config.given_options import given_options
from benchmark.tables.cells import make_cells
from benchmark.tables.layout import load_table
from benchmark.tables.paper import read_paper

ROOT = Path(__file__).parents[3]
TABLES: dict[str, dict[str, Any]] = {
    path.stem: yaml.load(path.read_bytes(), yaml.CSafeLoader)
    for path in sorted((ROOT / "configs/tables").glob("*.yaml"))
}
#: Tables that no paper has.
OWN = (
    *(
        "compressed_uploads",
        "floors",
        "hostile_clients",
        "late_clients",
        "lost_uploads",
        "low_rank",
        "ood_prompts",
        "private_prompts",
    ),
    "text_prompts",
)


@pytest.fixture(autouse=True)
def _in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def configuration(row: dict[str, Any], group: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    """Return what all files and overrides of a row on a data group give together, without the row's own overrides."""
    files = [f"configs/methods/{row['method']}.yaml", f"configs/suites/{group['suite']}.yaml"]
    data = [f"--data=configs/{entry}.yaml" for entry in group.get("data", [])]
    overrides = [*data, *preset.get("overrides", []), *group.get("overrides", [])]
    return given_options([*files, *scales(preset)], overrides)


def scales(preset: dict[str, Any]) -> list[str]:
    """The file of a preset's scale, where it has one."""
    return [f"configs/scales/{preset['scale']}.yaml"] if "scale" in preset else []


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_every_table_is_one(name: str) -> None:
    assert load_table(name).rows


@pytest.mark.parametrize("name", TABLES)
def test_every_file_that_a_table_names_is_there(name: str) -> None:
    table = TABLES[name]
    assert "demo" in table["presets"]
    assert name in OWN or "paper" in table["presets"]
    for preset in table["presets"].values():
        for group in preset["data"]:
            files = [f"configs/methods/{row['method']}.yaml" for row in table["rows"]]
            files += [f"configs/suites/{group['suite']}.yaml", *scales(preset)]
            files += [f"configs/{entry}.yaml" for entry in group.get("data", [])]
            assert [entry for entry in files if not Path(entry).is_file()] == []
            assert not [entry for entry in group.get("overrides", []) if entry.startswith("--data=")]


@pytest.mark.parametrize("name", TABLES)
def test_incomplete_batches_are_dropped_where_the_protocol_says_so(name: str) -> None:
    """In pFedPT's comparison (PFLlib) and in the CLIP family (Dassl), in every preset.

    Besides, as the files of their partitions have it: five of our tables on ``partitions/iid``, and the floors of
    CIFAR-100 on ``partitions/dirichlet_n100``.
    """
    dropping = name.startswith(("pfedpt_", "fedpgp_", "atpfl_", "fedmgp_", "pfedmoap_", "dpfpl_"))
    dropping |= name in ("compressed_uploads", "hostile_clients", "late_clients", "lost_uploads", "private_prompts")
    for preset_name, preset in TABLES[name]["presets"].items():
        drops = dropping or (name, preset_name) == ("floors", "board_cifar100")
        for group in preset["data"]:
            assert TABLES[name]["rows"]
            for row in TABLES[name]["rows"]:
                data = configuration(row, group, preset)["data"]
                assert data.get("drop_last", False) == drops, (preset_name, group["name"], row["label"])


def trainer_value(key: str, config: dict[str, Any], overrides: list[str], default: int) -> int:
    """A setting of the Trainer in one cell: the last override's, or the configuration's."""
    given = [int(entry.partition("=")[2]) for entry in overrides if entry.startswith(f"--trainer.{key}=")]
    return [config["trainer"].get(key, default), *given][-1]


@pytest.mark.parametrize("name", TABLES)
def test_the_last_round_of_every_cell_is_evaluated(name: str) -> None:
    """Check that the last round of a cell is an evaluated one, also where only every fifth round is evaluated."""
    for preset_name, preset in TABLES[name]["presets"].items():
        for group in preset["data"]:
            for row in TABLES[name]["rows"]:
                config = configuration(row, group, preset)
                overrides = [
                    *preset.get("overrides", []),
                    *group.get("overrides", []),
                    *row.get("overrides", {}).get(preset_name, []),
                ]
                rounds = trainer_value("max_epochs", config, overrides, 0)
                every = trainer_value("check_val_every_n_epoch", config, overrides, 1)
                assert rounds % every == 0, (group["name"], row["label"])


def last_given(overrides: Sequence[str], name: str) -> str | None:
    """The value of an option that wins, if there is one."""
    return next((entry.partition("=")[2] for entry in reversed(overrides) if entry.startswith(f"--{name}=")), None)


#: Methods that add up what all clients send once.
SUMS = ("nearestclassmean", "federatedridge")


@pytest.mark.parametrize(
    "name", [n for n, table in TABLES.items() if any(r.get("method") in SUMS for r in table["rows"])]
)
def test_floors_that_are_sums_see_every_client(name: str) -> None:
    """They are exact after one round of all clients; a number of clients a round wins over their participation."""
    table = load_table(name)
    sums = {row.label for row in table.rows if row.method in SUMS}
    for preset_name, preset in table.presets.items():
        for (group, label, _), cell in make_cells(table, preset_name, preset).items():
            if label in sums and (few := last_given(cell.overrides, "data.clients_per_round")):
                assert few == last_given(cell.overrides, "data.partition.init_args.num_clients"), (group, label)


def left_unread() -> list[tuple[str, str, str]]:
    """Return file, column and pattern of each line of the README's list of numbers that no table reads."""
    text = (ROOT / "results/paper/README.md").read_text(encoding="utf-8")
    section = text.partition("### Not beside a number of ours")[2].partition("\n#")[0]
    lines = re.findall(r"^\| `(\w+)` \| (\w+(?: \w+)?) \| `([^`]+)` \| \S.* \|$", section, re.MULTILINE)
    assert len(lines) == section.count("\n| `")
    return lines


def read_by(table: dict[str, Any]) -> set[tuple[str, ...]]:
    """Dataset, setting, metric and method of the published numbers that a table asks for."""
    return {
        (number["dataset"], number["setting"], number.get("metric", "accuracy"), row["label"])
        for preset in table["presets"].values()
        for row in table["rows"]
        if row["label"] in preset.get("rows", [row["label"]])
        for group in preset["data"]
        for number in [*(column.get("paper") for column in group.get("columns", [])), group.get("cost")]
        if number is not None
    }


CSVS = sorted((ROOT / "results/paper").glob("*.csv"))


@pytest.mark.parametrize("csv", CSVS, ids=lambda path: path.stem)
def test_every_published_number_stands_in_a_table_or_is_said_not_to(csv: Path) -> None:
    published = read_paper([str(csv)])
    if set(published["setting"]) == {"dataset statistics"}:
        return
    tables = [table for table in TABLES.values() if f"results/paper/{csv.name}" in table.get("paper", [])]
    if csv.stem == "fedpgp_table6":  # the averages of Table 10's data sets
        assert tables
        return
    read = set().union(*map(read_by, tables))
    patterns = [(column, pattern) for name, column, pattern in left_unread() if name == csv.stem]
    unread = dict.fromkeys(patterns, 0)
    for row in published.to_dict("records"):
        fits = [
            (columns, pattern)
            for columns, pattern in patterns
            if fnmatchcase(" / ".join(row[column] for column in columns.split()), pattern)
        ]
        for pattern in fits:
            unread[pattern] += 1
        over_groups = row["dataset"] == "Average of 5" or row["setting"] == "LODO avg"
        is_read = (row["dataset"], row["setting"], row["metric"], row["method"]) in read
        assert is_read != bool(fits) or (over_groups and not is_read), row
    assert all(unread.values())


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if "paper" in table])
def test_no_column_names_a_number_that_was_not_published(name: str) -> None:
    published = read_paper([str(ROOT / path) for path in TABLES[name]["paper"]])
    there = set(zip(published["dataset"], published["setting"], published["metric"], strict=True))
    assert {number[:3] for number in read_by(TABLES[name])} <= there


def test_the_list_of_numbers_that_no_table_reads_names_files_that_are_there() -> None:
    assert {name for name, _, _ in left_unread()} <= {path.stem for path in CSVS}


def test_every_committed_table_finds_its_kept_runs() -> None:
    """A run's name holds a hash of its options; a renamed option would make `--kept` run everything anew."""
    kept, missing, made = {path.name for path in Path("results/runs").iterdir()}, {}, 0
    for name in TABLES:
        table = load_table(name)
        for preset, chosen in table.presets.items():
            if Path(f"results/tables/{name}_{preset}.md").is_file():
                cells = {cell.name for cell in make_cells(table, preset, chosen).values()}
                made += len(cells)
                missing |= {f"{name}, {preset}": sorted(cells - kept)[:2]} if cells - kept else {}
    assert missing == {}
    assert made > 900
