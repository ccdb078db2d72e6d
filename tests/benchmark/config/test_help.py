"""The help texts of ``lightning-cli``: its commands, its options, and the classes that can be chosen."""

import re

import pytest
from federation import CONF
from refusal import refused

import datamodules
import methods
from benchmark.config.overview import COMMANDS
from benchmark.run import start
from benchmark.run.cli import main
from methods import servers

BASE = [f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'HeadTune.yaml'}"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the output of a command that ends well."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^0$"):
        start.main(arguments)
    return capsys.readouterr().out


def test_the_program_names_its_commands_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "--help")
    assert "Personalized federated prompt learning on images" in shown
    for name, what in COMMANDS.items():
        assert re.search(rf"^ +{name} +{what.split()[0]} ", shown, re.MULTILINE)
    assert "Lightning Trainer" not in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_said_in_words(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, command, "--help")
    assert shown.startswith(f"usage: lightning-cli {command} [--config FILE ...] [--OPTION=VALUE ...]\n")
    assert COMMANDS[command].split(",")[0][1:60] in " ".join(shown.split())
    assert "(type: a whole number from 0 to 4,294,967,295, default: 0)" in " ".join(shown.split())
    assert not re.search(r"functools|<function|PlainValidator|Range\(", shown)


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("model", set(methods.__all__)),
        ("server", set(servers.__all__)),
        ("data.source", {name for name in datamodules.__all__ if name.startswith(("CIFAR", "Digit", "ImageF"))}),
        ("data.partition", {name for name in datamodules.__all__ if name.startswith(("IID", "Dirichlet", "From"))}),
    ],
)
def test_help_without_a_class_lists_the_classes(
    option: str, names: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = said(capsys, "fit", *BASE, f"--{option}.help")
    listed = re.findall(r"^  (\w+)  +\S", shown, re.MULTILINE)
    assert names <= set(listed)
    assert listed == sorted(listed)
    assert shown.endswith(f"The arguments of one: lightning-cli fit --{option}.help {listed[0]}\n")
    assert max(map(len, shown.splitlines())) <= 120


def test_help_on_a_method_leaves_out_what_it_takes_from_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "fit", "--model.help", "methods.PFedPG")
    assert "--model.num_prompts NUM_PROMPTS" in shown
    assert "num_clients" not in shown
    assert "num_classes" not in shown


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["--model=methods.Nobody"],
            "model: there is no 'methods.Nobody'; `lightning-cli fit --model.help` lists them",
        ),
        (["--model=methods.FedVTP"], "'methods.FedVTP' (did you mean methods.FedVPT or "),
        (["--model=pfedpg"], "error: model: there is no 'pfedpg' (did you mean PFedPG or "),
        (["--data.source=datamodules.CIFAR1"], "no 'datamodules.CIFAR1' (did you mean datamodules.CIFAR10 or "),
        (["--data.partition=datamodules.Drichlet"], "(did you mean datamodules.Dirichlet"),
        (["--server=methods.servers.FedAdma"], "(did you mean methods.servers.FedAdam or "),
        (["--model.backbone=benchmark.backbones.vit.TimVit"], "(did you mean benchmark.backbones.vit.TimmViT?)"),
        (["--model.help=Nobody"], "error: model: there is no 'Nobody'; expected one of ATPFL, "),
    ],
)
def test_a_class_that_is_not_there_has_one_line_with_those_like_it(
    given: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = refused(capsys, main, ["fit", *BASE, *given])
    assert line in found
    assert ":;" not in found
