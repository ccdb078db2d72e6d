import importlib
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from recorded_results import HOSTILE, write_results, write_run

from benchmark.commands import main
from benchmark.errors import ConfigurationError
from benchmark.records.classes import own
from benchmark.records.environment import commit_days
from benchmark.records.grouped_runs import Run, group, read_run, read_runs
from benchmark.report.boards import boards, ranking
from benchmark.report.charts import _whole_ticks, curves
from benchmark.report.grid import GridCell
from benchmark.report.page import write_report
from benchmark.report.published import beside
from benchmark.tables.numbers import mean_std
from benchmark.tables.paper import read_paper

#: Names and addresses within the library, which is written into the page, are its own.
LIBRARY = re.compile(r'<script type="module">.*?</script>', re.DOTALL)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_results(tmp_path_factory.mktemp("results"))


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
    runs, problems, again = read_runs([results / "runs"])
    assert problems + again == []
    found = group(runs)
    assert [(each.name, len(each.runs)) for each in found] == [
        ("FedAvg", 2),
        ("FedVPT (lr 0.1)", 1),
        ("FedVPT (lr 0.5)", 1),
    ]
    assert found[0].place == ("CIFAR-10", "Dirichlet(0.1), 3 clients, 2 a round", "PaperCNN")
    assert not found[0].first.demo


@pytest.mark.parametrize(("codes", "note"), [(("1", "1"), ""), (("1", "2"), "of 2 codes")])
def test_seeds_of_different_code_are_said(codes: tuple[str, str], note: str, tmp_path: Path) -> None:
    for seed, digest in enumerate(codes):
        write_run(tmp_path / str(seed), "FedAvg", seed, [0.5, 0.7, 0.9], code={"my_method": digest})
    (board,) = boards(group(read_runs([tmp_path])[0]))
    table = ranking(board, read_paper([]))
    assert GridCell("2", note) in table.rows[0]


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
    # Older records do not name their images: they are grouped as before.
    assert found == {"CIFAR-10": ["old0", "old1"], "CIFAR-10 (A)": ["a0", "a1"], "CIFAR-10 (B)": ["b0", "b1"]}
    for name in ("a0", "a1", "b0", "b1"):
        shutil.rmtree(tmp_path / "runs" / name)
        write_run(tmp_path / "runs" / name, "FedVPT", int(name[1]), accuracies, images_sha256=name[0] * 64)
    found = {each.place[0]: len(each.runs) for each in group(read_runs([tmp_path / "runs"])[0])}
    assert found == {"CIFAR-10": 2, "CIFAR-10 (aaaaaaaa)": 2, "CIFAR-10 (bbbbbbbb)": 2}
    text = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert "CIFAR-10 (aaaaaaaa)" in text


def test_a_run_done_again_is_no_second_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("a", 0), ("again", 0), ("b", 1)):
        write_run(tmp_path / "runs" / name, "FedVPT", seed, [0.5, 0.7, 0.9], images_sha256="a" * 64)
    runs, problems, again = read_runs([tmp_path / "runs"])
    assert [[run.folder.name for run in each.runs] for each in group(runs)] == [["a", "b"]]
    assert problems == []
    runs = tmp_path / "runs"
    said = f"{runs / 'again'}: the same seed of the same experiment as {runs / 'a'}, which is shown"
    assert again == [said]
    assert main(["report", str(tmp_path / "page.html"), f"--results_dir={tmp_path}"]) == 0
    assert capsys.readouterr().err == f"not shown: {said}\n"
    page = unescape((tmp_path / "page.html").read_text())
    assert "Damaged" not in page
    assert f"<p>Done again, and not shown a second time:</p>\n<ul><li>{said}</li></ul>" in page


def test_what_may_change_when_a_run_goes_on_makes_no_other_experiment(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        write_run(tmp_path / "runs" / name, "FedVPT", seed, [0.5, 0.7, 0.9])
    runs = read_runs([tmp_path / "runs"])[0]
    longer = {"max_time": {"hours": 3}, "strategy": {"class_path": "benchmark.ranks.strategy.RanksStrategy"}}
    again = replace(runs[1], config={**runs[1].config, "trainer": longer})
    assert [len(each.runs) for each in group([runs[0], again])] == [2]


def test_a_run_made_again_is_shown_by_its_own_record_and_the_other_is_named(tmp_path: Path) -> None:
    kept, again = tmp_path / "results" / "runs", tmp_path / "runs"
    for folder, last in ((kept / "a", 0.9), (again / "a", 0.8), (kept / "b", 0.9), (again / "b", 0.9)):
        write_run(folder, "FedVPT" if folder.name == "a" else "FedAvg", 0, [0.5, 0.7, last])
    page = write_report(tmp_path / "page.html", tmp_path / "results", again)
    assert page.problems == []
    assert page.again == [f"{kept / 'a'}: has other numbers than {again / 'a'}, which is shown"]


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
    chain = {"server": "user_dp.UserDP(methods.servers.FedAdam)"}
    write_run(tmp_path / "runs" / "c", "FedVPT", 0, [0.5, 0.7, 0.9], lr=0.3, **own | chain)
    names = [each.name for each in group(read_runs([tmp_path / "runs"])[0])]
    assert names == ["FedVPT", "FedVPT with FedOpt", "FedVPT with UserDP(FedAdam)"]
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


def section(page: str, anchor: str) -> str:
    return page.split(f'<section id="{anchor}"')[1].split("</section>")[0]


def rows(html: str) -> list[list[str]]:
    """Texts of the cells of the first table."""
    table = html.split("<table")[1].split("</table>")[0]
    cells = [re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("<tr")[1:]]
    return [[" ".join(unescape(re.sub(r"<[^>]*>", " ", cell)).split()) for cell in row] for row in cells]


def charts(html: str) -> list[dict[str, Any]]:
    """The specifications of a section's charts."""
    return list(json.loads(html.split('<script type="application/json">')[1].split("</script>")[0]))


BOARD = "data-cifar-10-dirichlet-0-1-3-clients-2-a-round-papercnn-2-rounds"


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
        if (tag in ("img", "svg") or attributes.get("role") == "img") and attributes.get("aria-hidden") != "true":
            assert attributes.get("alt") or attributes.get("aria-label")
        if tag in ("input", "select"):
            assert attributes.get("name")
    assert not re.search(r"https?://|url\(|@import", LIBRARY.sub("", page, count=1))
    policy = next(a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy


def test_hostile_names_stay_text(page: str) -> None:
    assert HOSTILE not in page
    assert "&lt;/script&gt;&lt;img src=x" in page
    assert "<h2>A &lt;table&gt;</h2>" in page
    scripts = [attributes.get("type") for tag, attributes in _Collector(page).tags if tag == "script"]
    assert sorted(filter(None, scripts)) == ["application/json", "module", "module"]


def test_a_strangers_record_is_text_wherever_it_is_shown(tmp_path: Path) -> None:
    words = "<script>alert(1)</script>"
    machine = {"git": {"revision": words, "dirty": True}, "date": words, "hardware": {"cpu": words}}
    fields = {"environment": machine, "server": f"x.{words}"}
    write_run(tmp_path / "runs" / "a; echo $(b)", words, 0, [0.5, 0.7, 0.9], **fields)
    write_run(tmp_path / "runs" / "b", words, 0, [0.5, 0.7, 0.9], lr=words, **fields)  # type: ignore[arg-type]
    page = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert words not in page
    assert f"--config &#39;{tmp_path}/runs/a; echo $(b)/config.yaml&#39; --run_dir" in page  # nothing that a shell runs
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") > 10
    scripts = [attributes.get("type") for tag, attributes in _Collector(page).tags if tag == "script"]
    assert sorted(filter(None, scripts)) == ["application/json", "module", "module"]
    assert charts(section(page, BOARD))[0]["data"]["values"][0]["method"].startswith(words)


def test_a_run_says_with_how_many_threads_it_was_computed(tmp_path: Path) -> None:
    for name, threads in (("a", 1), ("b", 4)):
        machine = {"hardware": {"cpu": "Some CPU", "cores": 8, "threads": threads}}
        write_run(tmp_path / "runs" / name, f"Method{name}", 0, [0.5, 0.7, 0.9], environment=machine)
    page = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert "8 cores of Some CPU, 1 thread a run" in page
    assert "8 cores of Some CPU, 4 threads a run" in page


def test_the_numbers_are_those_of_the_records(page: str) -> None:
    board = section(page, "leaderboard")
    heads, *ranked = rows(board)
    assert [row[:2] for row in ranked] == [["1", "FedAvg"], ["2", "FedVPT lr 0.1"]]
    found = dict(zip(heads, ranked[0], strict=True))
    # Averages over clients 70 and 80; worst clients 50 and 60.
    assert found["After aggregation"] == "75.00 ± 7.07"
    assert found["After local training"] == "70.00 ± 0.00"
    assert found["Best round, on test data"] == "75.00 ± 7.07"
    assert found["Worst client"] == "55.00 ± 7.07"
    assert [found[name] for name in ("Seeds", "kB a round", "Seconds", "Paper")] == ["2", "8.0", "30", "61.92"]
    assert dict(zip(heads, ranked[1], strict=True))["After local training"] == "\N{EN DASH}"
    # The paper pools over all test images in the best round.
    assert found["Read as in the paper"] == "81.67 ± 7.07"  # of 10, 20 and 30 images
    assert "Paper: pFedPT Table 1, CNN, pooled over all test images, best round, chosen on test data." in board
    assert "The best round is chosen on test data" in board
    runs = rows(section(page, BOARD).split("<h3>Runs</h3>")[1])
    assert [row[:3] for row in runs[1:]] == [
        *(["FedAvg", "0", "2"], ["FedAvg", "1", "2"]),
        *(["FedVPT", "0", "2"], ["FedVPT (lr 0.5)", "0", "2"]),
    ]
    assert runs[1][runs[0].index("Command")].endswith("/runs/a0/config.yaml --run_dir again")
    table = section(page, "table-t-paper")
    assert '60.00 <span class="spread">± 1.50</span>' in table
    assert "62.00" in table
    assert "\N{MINUS SIGN}2.00" in table
    assert "+1.00 to +4.00" in table
    # What stands beside the paper's numbers says at which size it was run.
    assert "Preset paper. Eight of &lt;100&gt; rounds. Of the last round." in table.split("<table>")[0]
    assert "Eight of &lt;100&gt; rounds." in section(page, "tables")
    worst = rows(section(page, BOARD).split("Worst clients</h4>")[1])
    assert worst[1][:2] == ["FedAvg", "55.00 amazon"]


def test_ranks_are_given_within_one_identical_setting_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "FedAvg", 0, [0.5, 0.7, 0.9], images_sha256="b" * 64)
    write_run(tmp_path / "runs" / "b", "FedVPT", 0, [0.6, 0.7, 0.9], split="other")  # other images at a client
    write_run(tmp_path / "runs" / "c", "FedPer", 0, [0.7, 0.7, 0.9], images_sha256="a" * 64)
    alike = boards(group(read_runs([tmp_path / "runs"])[0]))
    assert sorted(each.name for board in alike for each in board.ranked) == ["FedAvg", "FedPer", "FedVPT"]
    assert len({board.anchor for board in alike}) == 3
    write_run(tmp_path / "runs" / "d", "FedPer", 0, [0.9, 0.9, 0.9], images_sha256="b" * 64)
    runs = read_runs([tmp_path / "runs"])[0]
    ranked = [[each.name for each in board.ranked] for board in boards(group(runs))]
    assert ["FedPer", "FedAvg"] in ranked
    longer = [run if run.folder.name != "d" else replace(run, record=replace(run.record, rounds=3)) for run in runs]
    assert ["FedPer", "FedAvg"] not in [[each.name for each in board.ranked] for board in boards(group(longer))]


def test_an_older_record_stands_with_the_only_known_images_of_its_partition(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "old", "FedAvg", 0, [0.5, 0.7, 0.9])
    write_run(tmp_path / "runs" / "new", "FedPer", 0, [0.7, 0.7, 0.9], images_sha256="a" * 64)
    write_run(tmp_path / "runs" / "seed", "FedAvg", 1, [0.5, 0.7, 0.9], images_sha256="a" * 64)
    (board,) = boards(group(read_runs([tmp_path / "runs"])[0]))
    assert [(each.name, len(each.runs)) for each in board.ranked] == [("FedPer", 1), ("FedAvg", 2)]


def test_the_work_of_a_round_is_told_as_it_was_configured_and_apart(tmp_path: Path) -> None:
    def work(folder: str, **training: int) -> str:
        write_run(tmp_path / "runs" / folder, "FedAvg", 0, [0.5, 0.7, 0.9], arguments={"training": training})
        return read_run(tmp_path / "runs" / folder).local_work

    assert work("a", epochs=5, steps=20) == "5 local epochs of at most 20 steps, batches of 8"
    assert work("b", epochs=1, steps=20) == "1 local epoch of at most 20 steps, batches of 8"
    assert work("c", epochs=5) == "5 local epochs, batches of 8"
    assert len(boards(group(read_runs([tmp_path / "runs"])[0]))) == 3


def test_shipped_values_are_ranked_before_the_usual_ones_among_experiments(tmp_path: Path) -> None:
    def prompted(folder: str, method: str, size: int, rate: float) -> None:
        prompt = {"class_path": "benchmark.backbones.pixel_prompts.PaddingPrompt", "init_args": {"size": size}}
        given = {"visual_prompt": prompt} if method == "PFedPT" else {}
        write_run(tmp_path / "runs" / folder, method, 0, [0.5, 0.7, 0.9], lr=rate, arguments=given)

    prompted("a", "PFedPT", 2, 0.05)
    prompted("b", "PFedPT", 4, 0.05)  # pFedPT is shipped with four pixels
    prompted("c", "PFedPT", 4, 0.005)
    prompted("d", "FedPer", 4, 0.005)
    prompted("e", "FedAvg", 4, 0.05)
    prompted("f", "FedAvg", 4, 0.005)
    prompted("g", "Local", 4, 0.005)
    (board,) = boards(group(read_runs([tmp_path / "runs"])[0]))
    assert {each.first.folder.name for each in board.ranked} == {"c", "d", "f", "g"}


def test_a_seed_that_diverged_is_not_left_out_of_the_mean(tmp_path: Path) -> None:
    assert mean_std([50.0, 70.0]) == "60.00 ± 14.14"
    assert mean_std([50.0, math.nan]) == mean_std([50.0, None]) == "not finite"
    assert mean_std([None]) == ""


@pytest.mark.parametrize("held_out", ["val_fraction", "new_clients"])
def test_who_holds_something_out_is_ranked_apart_and_it_is_said(held_out: str, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "FedAvg", 0, [0.5, 0.7, 0.9])
    write_run(tmp_path / "runs" / "b", "FedVPT", 0, [0.6, 0.7, 0.9])
    first, second = read_runs([tmp_path / "runs"])[0]
    assert len(boards(group([first, second]))) == 1
    second = replace(second, config={**second.config, "data": {**second.config["data"], held_out: 0.25}})
    assert len(boards(group([first, second]))) == 2
    assert "25 % of the" in second.setting


def test_a_method_stands_beside_its_paper_as_the_paper_reads_it(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(
        "paper,table,dataset,setting,backbone,method,metric,value,std\n"
        + "".join(f"P,1,CIFAR-10,dir0.1,CNN,{name},accuracy,70.0,\n" for name in ("pFedPG", "FedVPT"))
    )
    for name, method in (("a", "FedVPT"), ("b", "PFedPG")):
        write_run(tmp_path / "runs" / name, method, 0, [0.5, 0.7, 0.9], local=[0.8, 0.8, 0.8])
    (board,) = boards(group(read_runs([tmp_path / "runs"])[0]))
    table = ranking(board, read_paper([tmp_path / "p.csv"]))
    place = [str(head) for head in table.heads].index("Read as in the paper")
    assert {row[1].text: row[place].text for row in table.rows} == {"FedVPT": "70.00", "PFedPG": "80.00"}


@pytest.mark.parametrize(
    ("method", "arguments", "numbers"),
    [
        ("FedRoD", {}, [70.0]),
        ("FedRoD", {"train_backbone": True}, [70.0]),
        ("FedRoD", {"train_backbone": False}, []),
        ("HeadTune", {"head": "shared", "head_mu": None}, [70.0]),
        ("HeadTune", {"head_mu": 0.1}, []),
        ("HeadTune", {"head_finetuning": {"lr": 0.1}}, []),
        ("HeadTune", {"head": "personal"}, []),
        ("CoOp", {"clip": {"class_path": "benchmark.backbones.bert_clip.BertCLIP"}}, [70.0]),
        ("CoOp", {"clip": {"class_path": "benchmark.backbones.named_vit.NamedViT"}}, []),
    ],
)
def test_a_run_that_no_paper_has_stands_beside_no_number(
    method: str, arguments: dict[str, Any], numbers: list[float], tmp_path: Path
) -> None:
    heads = "paper,table,dataset,setting,backbone,method,metric,value,std"
    (tmp_path / "p.csv").write_text(f"{heads}\nP,1,CIFAR-10,dir0.1,CNN,{method},accuracy,70.0,\n")
    write_run(tmp_path / "a", method, 0, [0.5, 0.7, 0.9], arguments=arguments)
    assert beside(read_run(tmp_path / "a"), read_paper([tmp_path / "p.csv"]))["value"].tolist() == numbers


def test_which_experiment_of_a_method_is_ranked_is_no_matter_of_its_score(results: Path, tmp_path: Path) -> None:
    (board,) = boards(group(read_runs([results / "runs"])[0]))
    assert [each.first.folder.name for each in board.ranked] == ["a0", "b0"]
    assert [(each.name, each.first.folder.name) for each in board.variants] == [("FedVPT (lr 0.5)", "b1")]
    shutil.copytree(results / "runs", tmp_path / "runs")
    write_run(tmp_path / "runs" / "b2", "FedVPT", 1, [0.0, 0.0, 0.0], lr=0.5)  # worse, but with two seeds
    (board,) = boards(group(read_runs([tmp_path / "runs"])[0]))
    assert [each.first.folder.name for each in board.variants] == ["b0"]
    assert [each.name for each in board.alike] == ["FedVPT (lr 0.5)"]


def test_demo_runs_have_a_page_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "FedAvg", 0, [0.5, 0.7, 0.9])
    write_run(tmp_path / "runs" / "b", "FedVPT", 0, [0.5, 0.7, 0.9], source="DigitDomains")
    page = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert [row[1] for row in rows(section(page, "leaderboard"))[1:]] == ["FedAvg"]
    heads, *shown = rows(section(page, "demo"))
    assert [row[1] for row in shown] == ["FedVPT"]
    assert "Paper" not in heads
    assert "1 run marked demo" in page


def test_a_page_opens_with_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("mine/a"), "FedVPT", 0, [0.5, 0.7, 0.9], source="DigitDomains")
    page = write_report(Path("page.html"), runs_dir=Path("mine")).path.read_text()
    assert re.findall(r'<section id="(\w+)"', page)[0] == "demo"
    assert "no such runs" not in page
    assert 'href="#leaderboard"' not in page
    assert "from the records in <code>mine</code>" in page


def test_settings_of_one_data_set_have_headings_of_their_own(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "FedAvg", 0, [0.5, 0.7, 0.9])
    write_run(tmp_path / "runs" / "b", "FedVPT", 0, [0.5, 0.7, 0.9], arguments={"backbone": "OtherCNN"})
    write_run(tmp_path / "runs" / "c", "FedVPT", 0, [0.5, 0.7, 0.9], source="CIFAR100")
    page = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    shown = re.findall(r"<h3><a [^>]*>(.*?)</a>", page)
    assert len(set(shown)) == 3
    assert [text.partition(",")[0] for text in shown] == ["CIFAR-10", "CIFAR-10", "CIFAR-100"]
    assert sorted(text.split(", ")[1] for text in shown[:2]) == ["OtherCNN", "PaperCNN"]
    assert shown[2] == "CIFAR-100"


def test_a_short_chart_has_a_tick_a_round() -> None:
    assert _whole_ticks([0, 1]) == {"values": [0, 1]}
    assert _whole_ticks([0, 50, 100]) == {"tickMinStep": 1}


def test_a_date_is_the_runs_own_or_its_commits(tmp_path: Path) -> None:
    environment = {"git": {"revision": "f" * 40, "dirty": False}, "date": "2026-11-23"}
    write_run(tmp_path / "runs" / "a", "FedAvg", 0, [0.5, 0.7, 0.9], environment=environment)
    (tmp_path / "runs" / "b").parent.mkdir(exist_ok=True)
    write_run(tmp_path / "runs" / "b", "FedPer", 0, [0.5, 0.6, 0.9])
    text = section(write_report(tmp_path / "page.html", tmp_path).path.read_text(), BOARD)
    heads, *runs = rows(text.split("<h3>Runs</h3>")[1])
    place = heads.index("Date")
    assert [row[place : place + 2] for row in runs] == [["2026-11-23", "fffffff"], ["\N{EN DASH}", "\N{EN DASH}"]]
    assert commit_days(["--all", "f" * 40, "x; ls"]).keys() <= set(commit_days(["f" * 40]))


def test_numbers_are_written_as_read() -> None:
    assert (GridCell("75.00 ± 7.07").value, GridCell("75.00 ± 7.07").spread) == ("75.00", "7.07")
    assert GridCell("43969.5").shown == "43,969.5"
    assert GridCell("-2.00").shown == "\N{MINUS SIGN}2.00"
    assert GridCell("FedVPT-2").shown == "FedVPT-2"
    assert (GridCell("4865227", code=True).value, GridCell("4865227", code=True).shown) == ("", "4865227")


def test_what_the_report_needs_is_said(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'federated-prompt-benchmark\[report\]'"):
        write_report(tmp_path / "page.html", results)


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


def test_own_runs_are_enough_where_there_is_no_folder_of_results(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_report(Path("mine.html"), runs_dir=results / "runs").runs == len(list((results / "runs").iterdir()))
    with pytest.raises(ConfigurationError, match="results is no folder"):
        write_report(Path("mine.html"))
    with pytest.raises(ConfigurationError, match="nowhere is no folder"):
        write_report(Path("mine.html"), Path("nowhere"), results / "runs")


def test_a_run_that_kept_only_class_counts_shows_its_partition(results: Path, tmp_path: Path) -> None:
    shutil.copytree(results / "runs" / "b0", tmp_path / "runs" / "b0")
    manifest = tmp_path / "runs" / "b0" / "manifest.json"
    clients = [{"name": f"client {k}", "train_classes": [k % 7] * 100} for k in range(40)]
    classes = [f"class {c}" for c in range(100)]
    (manifest.parent / "partition.json").write_text(json.dumps({"class_names": classes, "clients": clients}))
    manifest.unlink()
    text = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    assert "Training images of 100 classes at 40 clients: 0 to 600 images and 0 to 100 classes a client" in text
    cells = charts(section(text, BOARD))[-1]["data"]["values"]
    assert len(cells) == 34 * 100  # what is not held is left out
    assert cells[0] == {"client": "client 1", "class": "class 0", "images": 1}
    (manifest.parent / "partition.json").write_text('{"clients": 3}')
    assert "stored no partition" in write_report(tmp_path / "page.html", tmp_path).path.read_text()


# --- charts ---


def test_every_chart_is_one_that_vega_lite_draws(page: str) -> None:
    specs = charts(section(page, BOARD))
    assert len(specs) == 7
    for spec in specs:
        drawn = vl_convert.vegalite_to_svg({**spec, "width": 400, "autosize": "pad"})
        assert "<path" in drawn or "<rect" in drawn
    # What is hidden at first are the variants, and they are drawn when nothing is.
    hidden = [spec["params"][0] for spec in specs if "params" in spec]
    assert hidden == [{"name": "hidden", "value": ["FedVPT (lr 0.5)"]}] * 6
    every = {**specs[2], "params": [{"name": "hidden", "value": []}], "width": 400}
    assert "FedVPT (lr 0.5)" not in vl_convert.vegalite_to_svg({**specs[2], "width": 400})
    assert "FedVPT (lr 0.5)" in vl_convert.vegalite_to_svg(every)


def test_charts_have_the_numbers_of_the_records(page: str) -> None:
    curves, _, clients, _, costs, _, partition = (spec["data"]["values"] for spec in charts(section(page, BOARD)))
    last = {row["method"]: row for row in curves if row["round"] == 2}
    assert last["FedAvg"] == {"method": "FedAvg", "round": 2, "accuracy": 75.0, "low": 70.0, "high": 80.0}
    assert last["FedVPT"] == {"method": "FedVPT", "round": 2, "accuracy": 30.0}
    assert {(row["client"], row["accuracy"]) for row in clients if row["method"] == "FedAvg"} == {
        ("amazon", 55.0),
        ("dslr", 75.0),
        (HOSTILE, 95.0),
    }
    assert {"method": "FedVPT", "kB": 0.0, "accuracy": 30.0} in costs  # nothing sent has a place too
    assert [(row["client"], row["class"], row["images"]) for row in partition] == [
        *(("amazon", "bike", 5), ("dslr", "bike", 1), ("dslr", "mug", 1)),
        (HOSTILE, "mug", 7),
    ]


def test_a_record_names_no_module_that_is_imported_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "somebodys.py").write_text("class Pets:\n    title = 'Pets'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert own("somebodys.Pets", "title") is None
    assert "somebodys" not in sys.modules
    importlib.import_module("somebodys")
    assert own("somebodys.Pets", "title") == "Pets"
    monkeypatch.delitem(sys.modules, "somebodys")


def test_a_tuned_row_is_ranked_beside_the_untuned_and_says_its_trials(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", "FedVPT", 0, [0.5, 0.7, 0.9])
    tuning = {"trials": 16, "chosen_on": "val", "study": "s"}
    write_run(tmp_path / "runs" / "b", "FedVPT", 0, [0.6, 0.8, 0.9], lr=0.3, tuning=tuning)
    heads, *ranked = rows(section(write_report(tmp_path / "page.html", tmp_path).path.read_text(), "leaderboard"))
    assert [row[:2] for row in ranked] == [["1", "FedVPT, tuned"], ["2", "FedVPT"]]
    assert [row[heads.index("Tuned")] for row in ranked] == ["16 trials, val", "no"]


def test_gains_over_training_alone_are_those_by_hand(tmp_path: Path) -> None:
    work = {"arguments": {"training": {"epochs": 1}}}
    write_run(tmp_path / "runs" / "a", "FedVPT", 0, [0.6, 0.5, 0.666667], **work)
    write_run(tmp_path / "runs" / "b", "Local", 0, [0.6, 0.75, 0.333333], up=0.0, **work)
    write_run(tmp_path / "runs" / "c", "FedPer", 1, [0.6, 0.5, 0.7], **work)  # another seed: no pair
    text = write_report(tmp_path / "page.html", tmp_path).path.read_text()
    heads, *found = rows(text.split("<h4>Gain over training alone</h4>")[1].split("</table>")[0])
    assert heads == ["Method", "Against", "Mean gain", "Lowest gain", "% better off", "% worse off", "Pairs"]
    minus = "\N{MINUS SIGN}"
    assert found == [["FedVPT", "Local", "+2.78", f"{minus}25.00", "33.3", "33.3", "3"]]


def test_where_nobody_trains_alone_there_is_no_gain_over_it(page: str, tmp_path: Path) -> None:
    assert "Gain over training alone" not in page  # a method that sends nothing, and trains nothing
    for name, method, up in (("a", "FedVPT", 1.0), ("b", "Local", 0.0)):
        split = {"split": name, "arguments": {"training": {"epochs": 1}}}
        write_run(tmp_path / "runs" / name, method, 0, [0.5, 0.7, 0.9], up=up, **split)
    assert "Gain over training alone" not in write_report(tmp_path / "page.html", tmp_path).path.read_text()


def test_runs_with_a_virtual_clock_have_a_chart_by_its_seconds(tmp_path: Path) -> None:
    clock = {"clock": {"1": 10.0, "2": 26.0}}
    write_run(tmp_path / "runs" / "slow", "FedVPT", 0, [0.4, 0.6, 0.8], facts=clock)
    write_run(tmp_path / "runs" / "slow2", "FedVPT", 1, [0.4, 0.6, 0.8], facts={"clock": {"1": 12.0, "2": 30.0}})
    write_run(tmp_path / "runs" / "plain", "FedAvg", 0, [0.4, 0.6, 0.8])
    (board,) = boards(group(read_runs([tmp_path / "runs"])[0]))
    by_round, by_clock = curves(board)
    assert {row["method"] for row in by_round.spec["data"]["values"]} == {"FedVPT", "FedAvg"}
    rows = by_clock.spec["data"]["values"]
    assert [(row["method"], row["clock"], row["round"]) for row in rows] == [
        ("FedVPT", 0.0, 0),
        ("FedVPT", 11.0, 1),
        ("FedVPT", 28.0, 2),
    ]
    assert by_clock.spec["encoding"]["x"]["field"] == "clock"
    assert by_clock.label == (
        "Average test accuracy by seconds of the virtual clock; the last round ends at FedVPT 28.0"
    )
