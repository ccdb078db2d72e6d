"""Run directories, results, locks and caches from elsewhere: links, FIFOs, devices, huge and nested files.

Whatever lies in them, a command ends with one line, and what lies outside stays as it was.
"""

import hashlib
import json
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from bad_input.test_records import prepared as prepared  # two finished runs, made without training
from bad_input.test_records import rehashed, rewritten
from federation import CONF
from PIL import Image
from refusal import refused, within

from benchmark import commands
from benchmark.cells.identity import Cell, content_hash
from benchmark.cells.queue import run_cells
from benchmark.cells.work import Work
from benchmark.errors import ConfigurationError
from benchmark.files import check_no_links, open_regular
from benchmark.locks import FileLock
from benchmark.records.evaluations import remove_evaluations, remove_merged
from benchmark.records.hashes import config_hash, manifest_hash
from benchmark.records.metrics_table import read_table, write_parquet
from benchmark.run import cli
from benchmark.run.run_directory import claimed
from benchmark.tuning.study import Study
from datamodules.folders import read_images

Capsys = pytest.CaptureFixture[str]
RUN = Path("results/runs/a")
SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture(autouse=True)
def outside(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Results and an unfinished run beside a home folder, which no test may change."""
    shutil.copytree(prepared, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    home = tmp_path / "home"
    home.mkdir()
    for name in ("thesis.tex", "id_rsa", "round-000001.parquet", ".last.ckpt.17.tmp"):
        (home / name).write_text(SECRET)
    shutil.copytree(RUN, "down")
    Path("down/record.json").unlink()
    Path("down/checkpoints").mkdir()
    Path("down/checkpoints/last.ckpt").write_text("a checkpoint")
    before = sorted((path, path.read_text()) for path in home.iterdir())
    yield
    assert sorted((path, path.read_text()) for path in home.iterdir()) == before


def a_link(path: Path) -> None:
    path.symlink_to(Path("../home/thesis.tex").resolve())


def a_link_to_a_folder(path: Path) -> None:
    path.symlink_to(Path("../home").resolve())


def a_link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    there = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(there)


def huge(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(2**34)


KINDS = (a_link, a_link_to_a_folder, a_link_to_zeros, a_fifo, a_socket)
READ = ("config.yaml", "manifest.json", "metrics.parquet", "record.json")
WRITTEN = (
    *(".lock", "lock", "log.txt", "config.yaml", "manifest.json", "metrics.parquet", "record.json", "partition.png"),
    "federation.json",
    *(
        "metrics",
        "metrics/round-000001.parquet",
        "checkpoints",
        "checkpoints/last.ckpt",
        "checkpoints/.last.ckpt.1.tmp",
    ),
    *("csv", "csv/metrics.csv", "csv/hparams.yaml", "tensorboard", "tensorboard/hparams.yaml", "wandb", "wandb/run-1"),
)


def put(path: Path, make: Callable[[Path], None]) -> None:
    """Replace a file or a folder by something else."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("make", KINDS)
def test_a_run_goes_on_in_no_directory_that_leads_elsewhere(make: Any, name: str, capsys: Capsys) -> None:
    put(Path("down", name), make)
    with (
        pytest.raises(ConfigurationError, match=f"down is not used: down/{name} is .*; remove it"),
        claimed(Path("down"), None),
    ):
        pytest.fail("the directory was taken")
    assert f"down is not used: down/{name} is" in refused(capsys, commands.main, ["resume", "down"])
    assert not Path("down/.lock").is_file() or name == ".lock"


@pytest.mark.parametrize(
    "arguments", [["test", "--run_dir=down"], ["fit", "--config=headtune_digits", "--run_dir=down"]]
)
def test_a_run_directory_with_a_link_is_refused_by_each_command(arguments: list[str], capsys: Capsys) -> None:
    put(Path("down/metrics"), a_link_to_a_folder)
    assert "down is not used: down/metrics is a link that leads elsewhere" in refused(
        capsys, cli.main, [*arguments, "--run_dir=down"]
    )


@pytest.mark.parametrize("place", ["down/evil.py", "down/evil/__init__.py", "down/evil/x.py"])
@pytest.mark.parametrize("through_link", [False, True])
def test_a_run_directory_brings_no_code(
    place: str, through_link: bool, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    Path(place).parent.mkdir(exist_ok=True)
    Path(place).write_text("raise SystemExit('a stranger runs')\n")
    folder = "link" if through_link else "down"
    Path("link").symlink_to("down")
    named = f"{folder}.evil.x.Method"
    Path("down/config.yaml").write_text(f"model: {{class_path: {named}}}\ndata: {{}}\n")
    Image.new("RGB", (8, 8)).save("x.png")
    for command in (["predict", folder, "x.png"], ["export", folder, "out"], ["resume", folder]):
        line = refused(capsys, commands.main, command)
        assert f"{folder}/config.yaml names {named}, which lies in {folder} itself: a run leaves no code" in line
    assert "which lies in" in refused(capsys, cli.main, ["test", f"--run_dir={folder}"])


@pytest.mark.parametrize("how", [["--resolve"], ["--rerun", "1000"]])
def test_verify_runs_no_code_that_a_run_directory_brings(
    how: list[str], capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == ["--resolve"]:  # the other starts a process, which looks in the working directory by itself
        monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setenv("PYTHONPATH", str(CONF.parents[1]))
    (RUN / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('marker').touch()\nclass FedAvg: pass\n"
    )
    named = "results.runs.a.evil.FedAvg"
    backbone = {"class_path": "benchmark.backbones.vit.TimmViT", "init_args": {"name": "micro_vit"}}
    method = {"class_path": named, "init_args": {"backbone": backbone}}
    config = yaml.safe_load((RUN / "config.yaml").read_text()) | {"model": method}
    rehashed(RUN, "config.yaml", json.dumps(config).encode())
    rewritten(RUN, config_hash=config_hash(config))
    assert commands.main(["verify", str(RUN), *how]) == 1
    assert f"{RUN}/config.yaml names {named}, which lies in {RUN} itself" in capsys.readouterr().out
    assert not (RUN / "marker").exists()


@pytest.mark.parametrize("name", ["config.yaml", "federation.json", "record.json", "checkpoints/last.ckpt"])
@pytest.mark.parametrize("make", KINDS)
def test_a_directory_that_leads_elsewhere_is_no_model_to_use(make: Any, name: str, capsys: Capsys) -> None:
    put(Path("down", name), make)
    Image.new("RGB", (8, 8)).save("x.png")
    for command in (["predict", "down", "x.png"], ["export", "down", "out"]):
        assert f"down is not used: down/{name} is" in refused(capsys, commands.main, command)
    assert not Path("out").exists()


def test_a_run_directory_may_be_a_link_itself_and_hold_wandbs_own_links() -> None:
    Path("down/wandb/offline-run-1/logs").mkdir(parents=True)
    Path("down/wandb/latest-run").symlink_to("offline-run-1")
    Path("down/wandb/offline-run-1/logs/debug.log").symlink_to("../../latest-run/logs")
    Path("down/wandb/offline-run-1/logs/debug-core.log").symlink_to(Path("../home/thesis.tex").resolve())
    Path("runs").symlink_to("down")
    with claimed(Path("runs"), "down/checkpoints/last.ckpt"):
        assert Path("down/.lock").is_file()


def test_only_the_projects_own_leftovers_are_removed() -> None:
    kept = [Path("down/.notes.tmp"), Path("down/checkpoints/.draft.tmp"), Path("down/.x.y.tmp")]
    gone = [Path("down/.config.yaml.17.tmp"), Path("down/checkpoints/.last.ckpt.17.tmp")]
    for path in (*kept, *gone):
        path.write_text("half")
    with claimed(Path("down"), "down/checkpoints/last.ckpt"):
        assert [path.exists() for path in (*kept, *gone)] == [True] * 3 + [False] * 2


def test_a_lock_that_is_none_of_ours_keeps_its_text() -> None:
    for text in ("thesis", "held: ", "\0" * 10):
        Path(".lock").write_text(text)
        with pytest.raises(ConfigurationError, match=r"\.lock is no lock of a run, and would be written over"):
            FileLock(Path(".lock"))
        assert Path(".lock").read_text() == text
    for make in KINDS:
        put(Path("x.lock"), make)
        with pytest.raises(ConfigurationError, match=r"x\.lock (is no lock of a run|cannot be written)"):
            FileLock(Path("x.lock"))


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("make", [*KINDS, huge])
def test_what_is_no_file_of_a_finished_run_is_not_read(make: Any, name: str, capsys: Capsys) -> None:
    put(RUN / name, make)
    said = refused(capsys, commands.main, ["keep", str(RUN)])
    assert f"{name} " in said
    with within(10):
        assert commands.main(["verify", str(RUN)]) == 1
    assert f"{name} " in capsys.readouterr().out
    if name == "record.json":
        assert "record.json is not a readable record (" in refused(capsys, commands.main, ["show", str(RUN)])
    assert SECRET not in said


def test_the_report_leaves_out_what_is_no_run_and_shows_the_others(capsys: Capsys) -> None:
    for number, make in enumerate((*KINDS, huge)):
        for name in READ:
            bad = Path("results/runs", f"bad-{number}-{name}")
            shutil.copytree(RUN, bad)
            put(bad / name, make)
    Path("results/runs/elsewhere").symlink_to(Path("../home").resolve())
    Path("../home/record.json").symlink_to("id_rsa")
    Path("results/figures").mkdir()
    for number, make in enumerate((*KINDS, huge)):
        put(Path(f"results/figures/x{number}.png"), make)
        Path(f"results/figures/y{number}.png").write_bytes(b"png")
        put(Path(f"results/figures/y{number}.txt"), make)
    Path("results/tables").mkdir(exist_ok=True)
    put(Path("results/tables/t.csv"), a_link)
    try:
        assert commands.main(["report", "page.html"]) == 1
    finally:
        Path("../home/record.json").unlink()
    said = capsys.readouterr().err
    page = Path("page.html").read_text()
    assert "<p>2 runs, 1 method" in page
    assert SECRET not in page
    assert said.count("left out: results/runs/bad-") >= 20
    assert said.count("left out: results/figures/") == 12
    assert "results/runs/elsewhere is a link, and is not followed" in said
    assert "t.csv is not a table's CSV of this version (OSError: it is a link)" in said


@pytest.mark.parametrize("name", ["runs", "tables", "paper", "figures"])
def test_a_results_folder_shows_what_lies_in_it_alone(name: str, capsys: Capsys) -> None:
    put(Path("results", name), a_link_to_a_folder)
    assert f"results/{name} is a link, and is not followed" in refused(capsys, commands.main, ["report", "page.html"])


@pytest.mark.parametrize("target", ["/dev/null", "fifo", "folder", "device", "socket"])
def test_a_report_replaces_nothing_but_files(target: str, capsys: Capsys) -> None:
    os.mkfifo("fifo")
    Path("folder").mkdir()
    Path("device").symlink_to("/dev/null")
    a_socket(Path("socket"))
    assert f"cannot be written to {target}" in refused(capsys, commands.main, ["report", target])
    assert Path("device").is_symlink()
    assert Path("/dev/null").is_char_device()


def test_only_what_a_hash_covers_is_kept() -> None:
    a_link(RUN / "partition.json")
    assert commands.main(["keep", str(RUN)]) == 0
    assert commands.main(["keep", "down"]) == 2
    shutil.copytree(RUN, "c", symlinks=True)
    assert commands.main(["keep", "c"]) == 0
    assert not Path("results/runs/c/partition.json").exists()


def test_of_a_kept_partition_only_its_own_fields_are_kept_again(capsys: Capsys) -> None:
    manifest = json.loads((RUN / "manifest.json").read_text()) | {"padding": "x" * 200_000}
    content = json.dumps(manifest).encode()
    rehashed(RUN, "manifest.json", content)
    rewritten(RUN, manifest_hash=manifest_hash(manifest))
    (RUN / "manifest.json").unlink()
    clients = manifest["clients"]
    partition = {"clients": clients, "manifest_sha256": hashlib.sha256(content).hexdigest(), "secret": SECRET}
    (RUN / "partition.json").write_text(json.dumps(partition))
    shutil.copytree(RUN, "c")
    assert commands.main(["keep", "c"]) == 0
    assert SECRET not in Path("results/runs/c/partition.json").read_text()
    put(Path("c/partition.json"), a_link)
    capsys.readouterr()
    assert "partition.json cannot be read: it is a link" in refused(capsys, commands.main, ["keep", "c"])


def many_rows(run: Path, count: int = 3_000_000) -> bytes:
    """A table of as many rows, all alike, in few kilobytes."""

    def name(value: str) -> pa.Array:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int8)), pa.array([value]))

    zeros = np.zeros(count, np.int32)
    table = pa.table(
        {
            "round": zeros,
            "client": zeros,
            "point": name("server"),
            "split": name("test"),
            "metric": name("accuracy"),
            "value": zeros.astype(float),
        }
    )
    pq.write_table(table, sink := pa.BufferOutputStream(), compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def test_a_small_file_of_many_rows_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.records.metrics_table.MOST_ROWS", 10_000)
    Path("many.parquet").write_bytes(content := many_rows(RUN, 50_000))
    assert len(content) < 10_000
    with pytest.raises(ConfigurationError, match="it has 50,000 rows, and at most 10,000 could be the run's"):
        read_table(Path("many.parquet"))


HUGE: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "rows of no run": ("metrics.parquet", many_rows, "it has 3,000,000 rows, and at most 9 could be the run's"),
    "a million keys": (
        "config.yaml",
        lambda run: b"".join(b"k%d: 1\n" % number for number in range(10**6)),
        "config.yaml cannot be read: it has 10,888,890 bytes",
    ),
    "deep lists": ("config.yaml", lambda run: b"a: " + b"[" * 10**5 + b"]" * 10**5, "inside each other"),
    "a JSON of empty objects": (
        "manifest.json",
        lambda run: b"[" + b"{}," * 2 * 10**7 + b"{}]",
        "it holds more values than there is memory for",
    ),
}


@pytest.mark.parametrize("case", HUGE)
def test_what_would_fill_the_memory_is_left_out(case: str, capsys: Capsys) -> None:
    name, content, words = HUGE[case]
    rehashed(RUN, name, content(RUN))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(20):
        assert commands.main(["verify", str(RUN)]) == 1
    assert words in capsys.readouterr().out
    assert words in refused(capsys, commands.main, ["keep", str(RUN)])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10**6  # kilobytes


def test_a_configuration_of_a_million_keys_is_no_configuration(capsys: Capsys) -> None:
    Path("keys.yaml").write_text("".join(f"k{number}: 1\n" for number in range(10**6)))
    assert "it has 10,888,890 bytes; at most" in refused(capsys, cli.main, ["fit", "--config=keys.yaml"])


@pytest.mark.parametrize("make", KINDS)
def test_a_table_fails_the_cell_whose_folder_leads_elsewhere(make: Any) -> None:
    overrides = ("--trainer.max_epochs=0",)
    cell = Cell(f"x-{content_hash((), overrides)}", (), overrides, 0)
    for place in (Path("runs", cell.name), Path("runs", cell.name, "log.txt")):
        put(place, make)
        error = run_cells([cell], Work(Path("runs"), program=("never",)), 1)[cell.name].error
        assert "is a link, and is not followed" in error or "is not used: " in error or "cannot be" in error
        shutil.rmtree("runs")


def test_the_locks_of_studies_lie_in_no_linked_folder() -> None:
    Path("runs").mkdir()
    a_link_to_a_folder(Path("runs/.studies"))
    with pytest.raises(ConfigurationError, match="is a link, and is not followed"):
        Study(None, Path("runs/.studies"), Path("runs"))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", KINDS)
def test_an_image_cache_that_leads_elsewhere_is_not_used(make: Any) -> None:
    Path("images").mkdir()
    Image.new("RGB", (4, 4)).save("images/x.png")
    read_images(Path("images"), ["x.png"], 4, "squash")
    for entry in (*Path("images/.cache").glob("*"), Path("images/.cache")):
        put(entry, make)
        with within(10), pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_, **__: None)
            assert read_images(Path("images"), ["x.png"], 4, "squash").images.shape == (1, 3, 4, 4)
        assert entry != Path("images/.cache") or not entry.is_dir() or entry.is_symlink()


LONG = "x" * 5000
NO_NAMES = [(LONG, "long"), ("a\0b", "embedded null"), ("a\udcff", "UTF-8")]
GIVEN = {
    "resume": [LONG],
    "show": [LONG],
    "verify": [LONG],
    "keep": [LONG],
    "table": [LONG],
    "tune": [LONG],
    "report": ["page.html", "--results_dir", LONG],
    "partition": [LONG, "x.png"],
    "figure": ["pfedpt_fig4", "--run_dir", LONG],
    "reproduction": ["--results_dir", LONG],
}


@pytest.mark.parametrize("command", GIVEN)
@pytest.mark.parametrize(("name", "why"), NO_NAMES)
def test_what_no_file_can_be_called_is_refused(command: str, name: str, why: str, capsys: Capsys) -> None:
    given = [name if word is LONG else word for word in GIVEN[command]]
    assert why in refused(capsys, commands.main, [command, *given])


@pytest.mark.parametrize(("name", "why"), NO_NAMES)
def test_no_run_is_called_what_no_file_can_be(name: str, why: str, capsys: Capsys) -> None:
    line = refused(capsys, cli.main, ["fit", "--config=headtune_digits", f"--run_dir={name}"])
    assert why in line


def test_metrics_of_a_run_that_goes_on_are_its_own_files_alone() -> None:
    table = read_table(RUN / "metrics.parquet")
    Path("metrics").mkdir()
    for number in (0, 1, 2):
        write_parquet(Path(f"metrics/round-{number:06d}.parquet"), table[table["round"] == number])
    for name in ("notes.txt", "round-1.parquet", "round-000009.parquet.bak"):
        Path("metrics", name).write_text("mine")
    assert len(read_table(Path("metrics"))) == len(table)
    remove_evaluations(Path(), {0: "", 1: ""})
    assert len(list(Path("metrics").iterdir())) == 5
    remove_merged(Path())
    assert len(list(Path("metrics").iterdir())) == 3


def test_what_is_opened_is_a_file() -> None:
    for number, make in enumerate((*KINDS, Path.mkdir)):
        make(Path(str(number)))
        with pytest.raises(OSError, match=r"it is a link|it is no regular file|Is a directory"):
            open_regular(str(number))
    with pytest.raises(ConfigurationError, match="which no run makes"):
        check_no_links(Path())
