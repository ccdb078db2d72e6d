import importlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.files import write_json
from benchmark.records.classes import own
from benchmark.records.grouped_runs import Run, group, read_runs
from benchmark.records.metrics_table import COLUMNS
from benchmark.records.record import RunRecord
from benchmark.records.record_file import write_record
from benchmark.report import svg
from benchmark.report.page import write_report
from benchmark.tables.frame import LONG_COLUMNS

HOSTILE = '</script><img src=x onerror="document.title=1">'


def write_run(
    folder: Path,
    method: str,
    seed: int,
    accuracies: list[float],
    lr: float = 0.1,
    up: float = 4000.0,
    local: list[float] | None = None,
    root: str = "data",
    split: str = "abc",
    **fields: Any,
) -> None:
    """A run of three clients; the last one's name is hostile."""
    folder.mkdir(parents=True)
    config = {
        "seed_everything": seed,
        "model": {"class_path": f"methods.{method}", "init_args": {"backbone": "PaperCNN", "lr": lr}},
        "data": {
            "source": {"class_path": "datamodules.CIFAR10", "init_args": {"root": root}},
            "partition": {"class_path": "datamodules.DirichletShared", "init_args": {"alpha": 0.1}},
            "clients_per_round": 2,
        },
    }
    write_json(folder / "config.yaml", config)  # JSON is YAML
    names = ("amazon", "dslr", HOSTILE)
    counts = [[5, 0], [1, 1], [0, 7]]
    clients = [{"name": n, "train_classes": c, "test_classes": c} for n, c in zip(names, counts, strict=True)]
    write_json(folder / "manifest.json", {"class_names": ["bike", "mug"], "clients": clients})
    points = {"server": accuracies} | ({"local": local} if local else {})
    rows = [
        (number, client, point, "test", "accuracy", value * number / 2)
        for number in (0, 1, 2)
        for point, values in points.items()
        for client, value in enumerate(values)
    ]
    record = RunRecord(
        method=method,
        dataset="CIFAR10",
        setting="Dirichlet",
        seed=seed,
        client_names=names,
        test_sizes=(10, 20, 30),
        manifest_hash=split,
        device="cpu",
        environment={},
        rounds=2,
        rounds_trained=2,
        communication={"up_bytes": up, "down_bytes": up, "up_floats": up / 4, "down_floats": up / 4},
        seconds={"total": 30.0, "training": 2.0, "evaluation": 1.0},
        peak_memory_bytes=123_000_000,
        **fields,
    )
    write_record(folder, record, pd.DataFrame(rows, columns=list(COLUMNS)))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    write_run(folder / "runs" / "a0", "FedAvg", 0, [0.5, 0.7, 0.9], local=[0.6, 0.7, 0.8])
    write_run(folder / "runs" / "a1", "FedAvg", 1, [0.6, 0.8, 1.0], local=[0.6, 0.7, 0.8])
    write_run(folder / "runs" / "b0", "FedVPT", 0, [0.2, 0.4, 0.3], up=0.0)
    write_run(folder / "runs" / "b1", "FedVPT", 0, [0.1, 0.4, 0.4], lr=0.5)
    (folder / "tables").mkdir()
    shared = {"table": "t", "preset": "paper", "title": "A <table>", "dataset": "Rooms", "method": "Alpha", "seeds": 2}
    shared |= {"split": "test", "metric": "accuracy", "summary": "last", "bytes_up": 1000.0, "seconds": 3.0}
    lines: list[dict[str, Any]] = [
        {"kind": "column", "column": "Avg", "ours": 60.0, "std": 1.5, "paper": 62.0, "difference": -2.0},
        {"kind": "statistic", "column": "average", "ours": 60.0},
        {"kind": "paired", "column": "minus Beta", "ours": 2.5, "low": 1.0, "high": 4.0, "pairs": 6},
        {"kind": "note", "column": "Eight of <100> rounds.", "dataset": None},
    ]
    frame = pd.DataFrame([shared | line for line in lines]).reindex(columns=list(LONG_COLUMNS))
    frame.to_csv(folder / "tables" / "t_paper.csv", index=False)
    (folder / "tables" / "old_demo.csv").write_text("table,preset\nx,y\n")
    (folder / "figures").mkdir()
    Image.new("RGB", (40, 30), "red").save(folder / "figures" / "prompt_sizes.png")
    (folder / "figures" / "prompt_sizes.txt").write_text("Accuracy against the prompt's size & shape.")
    return folder


class _Collector(HTMLParser):
    """Tags with their attributes, and the ids and addresses of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def page(results: Path) -> str:
    written = write_report(results / "report.html", results)
    assert (written.runs, written.tables) == (4, 1)
    assert [("old_demo.csv is not a table's CSV" in p) for p in written.problems] == [True]
    return written.path.read_text()


def test_runs_are_grouped_over_seeds_and_told_apart(results: Path) -> None:
    runs, problems = read_runs([results / "runs"])
    assert problems == []
    found = group(runs)
    assert [(each.name, len(each.runs)) for each in found] == [
        ("FedAvg", 2),
        ("FedVPT (lr 0.1)", 1),
        ("FedVPT (lr 0.5)", 1),
    ]
    assert found[0].place == ("CIFAR-10", "Dirichlet(0.1), 3 clients, 2 a round", "PaperCNN")
    assert not found[0].first.demo


def test_two_folders_of_one_name_are_no_two_seeds(tmp_path: Path) -> None:
    accuracies = [0.5, 0.7, 0.9]
    for name, seed, root, images in (
        ("old0", 0, "two/A", None),
        ("old1", 1, "two/B", None),
        ("a0", 0, "two/A", "a" * 64),
        ("a1", 1, "elsewhere/A", "a" * 64),  # the same images somewhere else
        ("b0", 0, "two/B", "b" * 64),
        ("b1", 1, "two/B", "b" * 64),
    ):
        write_run(tmp_path / "runs" / name, "FedVPT", seed, accuracies, root=root, images_sha256=images)
    found = {each.place[0]: [run.folder.name for run in each.runs] for each in group(read_runs([tmp_path / "runs"])[0])}
    # Records of before do not know their images: they are grouped as they were.
    assert found == {"CIFAR-10": ["old0", "old1"], "CIFAR-10 (A)": ["a0", "a1"], "CIFAR-10 (B)": ["b0", "b1"]}
    for name in ("a0", "a1", "b0", "b1"):
        shutil.rmtree(tmp_path / "runs" / name)
        write_run(tmp_path / "runs" / name, "FedVPT", int(name[1]), accuracies, images_sha256=name[0] * 64)
    found = {each.place[0]: len(each.runs) for each in group(read_runs([tmp_path / "runs"])[0])}
    assert found == {"CIFAR-10": 2, "CIFAR-10 (aaaaaaaa)": 2, "CIFAR-10 (bbbbbbbb)": 2}
    text = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert "CIFAR-10 (aaaaaaaa)" in text


def test_another_partition_is_no_other_seed_unless_every_seed_draws_its_own(tmp_path: Path) -> None:
    for name, seed, split in (("a", 0, "x"), ("b", 1, "x"), ("c", 2, "y")):
        write_run(tmp_path / "runs" / name, "FedVPT", seed, [0.5, 0.7, 0.9], images_sha256="a" * 64, split=split)
    runs = read_runs([tmp_path / "runs"])[0]
    assert sorted(len(each.runs) for each in group(runs)) == [1, 2]
    drawn = [
        replace(run, config={**run.config, "data": {**run.config["data"], "partition_seed": None}}) for run in runs
    ]
    assert [len(each.runs) for each in group(drawn)] == [3]


def test_another_server_is_part_of_the_name(tmp_path: Path) -> None:
    own = {"server": "benchmark.server.ServerRule", "default_server": "benchmark.server.ServerRule"}
    write_run(tmp_path / "runs" / "a", "FedVPT", 0, [0.5, 0.7, 0.9], **own)
    write_run(tmp_path / "runs" / "b", "FedVPT", 0, [0.5, 0.7, 0.9], lr=0.2, **own | {"server": "my_methods.FedOpt"})
    assert [each.name for each in group(read_runs([tmp_path / "runs"])[0])] == ["FedVPT", "FedVPT with FedOpt"]
    assert "FedVPT with FedOpt" in write_report(tmp_path / "page.html", tmp_path).path.read_text()


def test_what_a_class_is_called_stands_with_the_class_alone() -> None:
    assert own({"class_path": "datamodules.CIFAR10"}, "title") == "CIFAR-10"
    assert own("datamodules.partition.DirichletShared", "title") == "Dirichlet({alpha}), {clients}"
    assert own("methods.LocalCLIP", "paper_names") == ("Local training",)
    for given in ("datamodules.DownloadableCoOpSource", "methods.CoOp", "nowhere.At.all", "methods", 3, None, {}):
        assert own(given, "title") is None
        assert own(given, "paper_names") is None


def test_experiments_are_told_apart_by_as_many_settings_as_it_takes(results: Path) -> None:
    runs = read_runs([results / "runs"])[0]
    run = next(run for run in runs if run.record.method == "FedVPT")

    def variant(**settings: Any) -> Run:
        config = {**run.config, "model": {"class_path": "methods.FedVPT", "init_args": settings}}
        return replace(run, config=config)

    variants = [
        variant(a=1, b=1, c=1, d=1),
        variant(a=2, b=2, c=2, d=1, later=5),  # a setting that the others do not have yet
        variant(a=2, b=2, c=2, d=2),
    ]
    names = sorted(each.name for each in group(variants))
    assert names == ["FedVPT (a 1, b 1, c 1)", "FedVPT (a 2, b 2, c 2, d 1)", "FedVPT (a 2, b 2, c 2, d 2)"]


def test_the_page_is_self_contained_and_every_link_leads_somewhere(page: str) -> None:
    tags = _Collector(page).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in tags:
        assert tag not in ("iframe", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attributes), attributes
        for name in ("src", "href"):
            address = attributes.get(name)
            assert address is None or address.startswith(("#", "data:")), address
            if address and address.startswith("#"):
                assert address[1:] in ids, address
        if tag in ("img", "svg") and attributes.get("aria-hidden") != "true":
            assert attributes.get("alt") or attributes.get("aria-label")
        if tag in ("input", "select"):
            assert attributes.get("name")
    assert not re.search(r"https?://|url\(|@import", page)


def test_hostile_names_stay_text(page: str) -> None:
    assert HOSTILE not in page
    assert "&lt;/script&gt;&lt;img src=x" in page
    assert "<h2>A &lt;table&gt;</h2>" in page
    assert [tag for tag, _ in _Collector(page).tags].count("script") == 1


def test_the_numbers_are_those_of_the_records(page: str) -> None:
    board = page.split('id="board"')[1].split("</table>")[0]
    row = re.search(r"<tr data-method=\"FedAvg\"[^>]*data-reading=\"after aggregation\">(.*?)</tr>", board, re.DOTALL)
    assert row
    # Averages over clients 70 and 80; worst clients 50 and 60.
    values = [float(v) for v in re.findall(r'data-value="([^"]*)"', row[1])]
    assert values[0] == pytest.approx(75.0)
    assert '75.00 <span class="spread">± 7.07</span>' in row[1]
    assert values[2] == pytest.approx(75.0)  # best
    assert values[3] == pytest.approx(55.0)  # worst
    assert values[-5:] == [2.0, 2.0, 8.0, 30.0, 123.0]  # rounds, seeds, kB, seconds, MB
    assert board.count("<tr data-method") == 4  # FedAvg also after local training
    assert "Best round, chosen on test data" in board
    table = page.split('id="table-t-paper"')[1].split("</section>")[0]
    assert '60.00 <span class="spread">± 1.50</span>' in table
    assert "62.00" in table
    assert "\N{MINUS SIGN}2.00" in table
    assert "+1.00 to +4.00" in table
    # What stands beside the paper's numbers says at which size it was run.
    assert "Preset paper. Eight of &lt;100&gt; rounds. Of the last round." in table.split("<table>")[0]
    worst = page.split("Worst clients</h3>")[1].split("</table>")[0]
    assert "amazon 55.00" in worst


def test_the_same_files_give_the_same_page(page: str, results: Path, tmp_path: Path) -> None:
    assert write_report(tmp_path / "again.html", results).path.read_text() == page


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    for name in ("runs", "tables"):
        (tmp_path / name).mkdir()
    text = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert "There are no finished runs yet." in text
    assert "No table has been made yet." in text
    with pytest.raises(ConfigurationError, match="is no folder"):
        write_report(tmp_path / "page.html", tmp_path / "nowhere")


def test_a_run_that_kept_only_class_counts_shows_its_partition(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "runs" / "b0", tmp_path / "runs" / "b0")
    manifest = tmp_path / "runs" / "b0" / "manifest.json"
    clients = [{"name": f"client {k}", "train_classes": [k % 7] * 100} for k in range(40)]
    classes = [f"class {c}" for c in range(100)]
    (manifest.parent / "partition.json").write_text(json.dumps({"class_names": classes, "clients": clients}))
    manifest.unlink()
    text = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert "Training images of 100 classes at 40 clients: 0 to 600 images and 0 to 100 classes a client" in text
    assert text.count("data:image/png;base64,") == 1  # too many cells for a drawing
    (manifest.parent / "partition.json").write_text('{"clients": 3}')
    assert "kept no partition" in write_report(tmp_path / "page.html", tmp_path).path.read_text()


# --- charts ---


def test_positions_of_a_line_chart() -> None:
    drawing = svg.line_chart([svg.Series("<m>", 0, [0, 10], [0.0, 100.0])], "round", "%", "what & why")
    start, end = re.search(r'class="line c0" d="M([\d.]+ [\d.]+)L([\d.]+ [\d.]+)"', drawing).groups()  # type: ignore[union-attr]
    assert start == "40.0 244.0"
    assert end == f"{svg.WIDTH - 12:.1f} 26.0"
    assert 'aria-label="what &amp; why"' in drawing
    assert "&lt;m&gt;, round 0: 0.00" in drawing
    broken = svg.line_chart([svg.Series("m", 0, [0, 1, 2, 3], [1.0, float("nan"), 2.0, 3.0])], "r", "%", "l")
    assert re.search(r'class="line c0" d="M[\d. ]+M[\d. ]+L[\d. ]+"', broken)


def test_zero_bytes_have_their_own_place() -> None:
    drawing = svg.scatter_chart([("Local", 0, 0.0, 80.0), ("Sent", 1, 1000.0, 90.0)], "kB", "%", "l")
    places = [float(x) for x in re.findall(r'class="mark c\d" transform="translate\(([\d.]+)', drawing)]
    assert places[0] > places[1]  # the best is drawn first
    assert ">0</text>" in drawing
    assert "Local: 0 kB, 80.00" in drawing


def test_a_heat_map_leaves_out_what_is_not_held() -> None:
    drawing = svg.heat_map(np.array([[4, 0], [1, 16]]), ["bike", "mug"], ["a", "b"], "l")
    assert drawing.count("<rect") == 3
    assert 'fill-opacity="1.000"><title>b, mug: 16' in drawing
    assert 'fill-opacity="0.540"><title>a, bike: 4' in drawing  # the square root: half way up


# --- in a browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium at 390 and 1400 px, both as the tests set it; no network needed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if not binary or not chromedriver:
        pytest.skip("no Chromium with chromedriver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()


def shown_names(browser: Any) -> list[str]:
    script = (
        "return [...document.querySelectorAll('#board tbody tr')].filter(r => !r.hidden).map(r => r.cells[0].innerText)"
    )
    return list(browser.execute_script(script))


def test_in_a_browser(page: str, results: Path, browser: Any) -> None:
    by_css = "css selector"
    address = (results / "report.html").as_uri()
    for width in (1400, 390):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get("about:blank")
        browser.get(address)
        for section in browser.find_elements(by_css, "main > section"):
            browser.get(f"{address}#{section.get_attribute('id')}")
            assert section.is_displayed()
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        open_now = "return document.querySelectorAll('main > section.open').length"
        assert browser.execute_script(open_now) == 1
        browser.get(f"{address}#figures")
        loaded = "return [...document.images].map(i => i.complete && i.naturalWidth > 0)"
        assert browser.execute_script(loaded) == [True]
        # Sorting: the last round's average downwards, then upwards.
        browser.get(f"{address}#leaderboard")
        head = browser.find_elements(by_css, "#board th")[1]
        button = head.find_element(by_css, "button")
        button.click()
        assert head.get_attribute("aria-sort") == "descending"
        assert shown_names(browser) == ["FedAvg", "FedAvg", "FedVPT (lr 0.1)", "FedVPT (lr 0.5)"]
        button.send_keys("\ue007")  # the Enter key
        assert head.get_attribute("aria-sort") == "ascending"
        assert shown_names(browser)[-1] == "FedAvg"
        # Filters.
        browser.find_element(by_css, "select[name=method] option:last-child").click()
        assert sorted(shown_names(browser)) == ["FedVPT (lr 0.1)", "FedVPT (lr 0.5)"]
        assert browser.find_element(by_css, "#shown").text == "2 of 4 rows"
        browser.find_element(by_css, "input[name=words]").send_keys("LR 0.5")
        assert shown_names(browser) == ["FedVPT (lr 0.5)"]
        browser.find_element(by_css, "form button").click()
        browser.execute_async_script("setTimeout(arguments[0])")
        assert len(shown_names(browser)) == 4
    assert browser.title.startswith("Leaderboard")
    assert browser.get_log("browser") == []


def test_a_record_names_no_module_that_is_imported_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys.py").write_text("class Pets:\n    title = 'Pets'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert own("somebodys.Pets", "title") is None
    assert "somebodys" not in sys.modules
    importlib.import_module("somebodys")
    assert own("somebodys.Pets", "title") == "Pets"
    monkeypatch.delitem(sys.modules, "somebodys")
