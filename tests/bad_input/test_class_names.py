"""Misspelled names of the suite's classes, told from its modules' text: what is refused, what is left to imports."""

from pathlib import Path

import pytest
from refusal import refused

import datamodules
import methods
from benchmark import compression, faults, privacy, robust
from benchmark.commands import main as benchmark_main
from benchmark.config.class_names import Named, check_names, names_in, names_in_files
from benchmark.errors import ConfigurationError
from benchmark.run import start
from benchmark.shipped import SHIPPED, configurations
from benchmark.tables.layout import check_classes, load_table
from methods import servers

OFFERED = (methods, datamodules, servers, privacy, robust, faults, compression)


def told(name: str, option: str = "model") -> str:
    with pytest.raises(ConfigurationError) as error:
        check_names([Named(name, option)])
    return str(error.value)


def test_every_class_that_the_suite_offers_is_known_by_its_path_and_alone() -> None:
    paths = [f"{module.__name__}.{name}" for module in OFFERED for name in module.__all__]
    full = [
        f"{found.__module__}.{name}"
        for module in OFFERED
        for name in module.__all__
        if isinstance(found := getattr(module, name), type)
    ]
    check_names([Named(path, "model") for path in [*paths, *full, *(path.rpartition(".")[2] for path in full)]])
    check_names([Named(path) for path in ("fedprompt.methods.FedVPT", "benchmark.backbones.vit.TimmViT")])


def test_every_configuration_and_table_that_comes_along_names_known_classes() -> None:
    files = [SHIPPED / "configs" / f"{name}.yaml" for name in configurations() if not name.startswith("tables/")]
    assert len(files) > 100
    for file in files:
        check_names([*names_in_files([file])])
    for path in sorted((SHIPPED / "configs/tables").glob("*.yaml"))[::8]:
        for preset in load_table(str(path)).presets:
            check_classes(str(path), preset)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("methods.FedVTP", "methods.FedVPT"),
        ("fedprompt.methods.FedVTP", "methods.FedVPT"),
        ("methods.fedvtp.FedVPT", "methods.fedvpt.FedVPT"),
        ("methods.fedvpt.FedVTP", "methods.fedvpt.FedVPT"),
        ("methods.FedAdam", "methods.servers.FedAdam"),  # in another module
        ("datamodules.Cifar10O", "datamodules.CIFAR10"),
        ("benchmark.bakcbones.vit.TimmViT", "benchmark.backbones.vit.TimmViT"),
        ("FedVTP", "FedVPT"),
        ("fedvpt_deep", "FedVPTDeep"),
    ],
)
def test_a_misspelled_class_is_told_with_what_is_like_it(name: str, like: str) -> None:
    said = told(name)
    assert said.startswith(f"model: there is no {name!r} (did you mean ")
    assert like in said.partition("?)")[0].removeprefix(f"model: there is no {name!r} (did you mean ").split(" or ")


def test_classes_of_ones_own_are_left_to_their_import() -> None:
    check_names([Named("my_module.MyMethod", "model"), Named("MyBackbone", "model.init_args.backbone")])
    check_names([Named("my_module.MyMethod", "model"), Named("MySource", "data.source")])  # it may be in my_module
    assert "there is no 'MySource'" in told("MySource", "data.source")
    check_names([Named("ModelCheckpoint", "trainer.callbacks"), Named("null", "server"), Named("benchmark.fit")])


def test_values_that_name_no_class_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").touch()
    monkeypatch.chdir(tmp_path)
    check_names([Named("mine", "model"), Named("datamodules.csv", "data.source.init_args.root")])
    found = names_in({"run_dir": "methods.FedVTP", "trainer": {"logger": True}, "model": {"class_path": "a.B"}})
    assert [*found] == [Named("a.B", "model.class_path")]


def test_a_file_is_named_with_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, data = tmp_path / "whole.yaml", tmp_path / "data.yaml"
    whole.write_text("base: [fedvpt_digits]\nmodel: {class_path: methods.FedVPTDep}\n")
    data.write_text("source: {class_path: datamodules.DigitDomain}\n")
    line = refused(capsys, start.main, ["fit", "--config", str(whole)])
    assert line.startswith(f"error: {whole}: model.class_path: there is no 'methods.FedVPTDep' (did you mean ")
    line = refused(capsys, start.main, ["fit", "--config=fedvpt_digits", f"--data={data}"])
    assert line.startswith(f"error: {data}: data.source.class_path: there is no 'datamodules.DigitDomain'")
    line = refused(capsys, start.main, ["fit", "--config=fedvpt_digits", "--model={class_path: methods.FedVTP}"])
    assert line.startswith("error: model.class_path: there is no 'methods.FedVTP'")
    line = refused(capsys, benchmark_main, ["check", "my.Method", "--config", str(whole)])
    assert line.startswith(f"benchmark: {whole}: model.class_path: there is no 'methods.FedVPTDep'")
    line = refused(capsys, benchmark_main, ["partition", str(whole), str(tmp_path / "x.png")])
    assert "there is no 'methods.FedVPTDep'" in line


@pytest.mark.parametrize("command", ["table", "tune"])
def test_a_table_names_the_class_that_is_not_there(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (SHIPPED / "configs/tables/floors.yaml").read_text()
    file = tmp_path / "mine.yaml"
    file.write_text(content.replace("    seeds:", '    overrides: ["--server=methods.servers.FedAdm"]\n    seeds:', 1))
    assert file.read_text() != content
    line = refused(capsys, benchmark_main, [command, str(file), "--preset", next(iter(load_table(str(file)).presets))])
    assert line.startswith("benchmark: server: there is no 'methods.servers.FedAdm' (did you mean methods.servers.Fed")
