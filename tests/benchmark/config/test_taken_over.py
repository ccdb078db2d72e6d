"""A class that takes another's place takes over arguments, and a run says which."""

from pathlib import Path

import pytest
import yaml
from federation import CONF

from benchmark.config.taken_over import taken_over
from benchmark.run.cli import main
from benchmark.run.command import resolved

PLACE = "--data.partition.init_args"
DIGITS = "--config=fedvpt_digits"
FEW_SHOT = "--data=partitions/dirichlet_few_shot"  # 20 clients of 200 images a class, alpha 0.1

IID_FIRST = ("--data.partition=IID", "--data.partition.num_clients=5", "--data.partition=DirichletShared")
ALL_GIVEN = ("--data.partition=DirichletShared", f"{PLACE}.alpha=0.5", "--data.partition.num_clients=7")


def said(*arguments: str) -> list[str]:
    return taken_over(["fit", *arguments], resolved(arguments))


def line(name: str, argument: str, earlier: str) -> str:
    option = argument.partition("=")[0]
    return f"data.partition: {name} takes over {argument} from {earlier}; {PLACE}.{option} gives another value"


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ((), []),
        ((FEW_SHOT, f"{PLACE}.alpha=0.5"), []),  # the same class
        (
            (FEW_SHOT, "--data.partition=DirichletShared"),
            [
                line("DirichletShared", "alpha=0.1", "DirichletFewShot"),
                line("DirichletShared", "num_clients=20", "DirichletFewShot"),
            ],
        ),
        (
            (FEW_SHOT, "--data.partition=DirichletShared", f"{PLACE}.alpha=0.5"),
            [line("DirichletShared", "num_clients=20", "DirichletFewShot")],
        ),
        (
            (FEW_SHOT, *ALL_GIVEN),
            [],
        ),
        (
            (*IID_FIRST, f"{PLACE}.alpha=0.3"),
            [line("DirichletShared", "num_clients=5", "IID")],
        ),
        (  # over one that lies between, and knows no alpha
            (FEW_SHOT, "--data.partition=IID", "--data.partition=DirichletShared", f"{PLACE}.alpha=0.3"),
            [line("DirichletShared", "num_clients=20", "IID")],
        ),
        (  # DirichletShared has at least ten images a client anyway
            (FEW_SHOT, f"{PLACE}.min_size=10", *ALL_GIVEN),
            [],
        ),
    ],
)
def test_what_goes_on_is_what_a_run_gets(arguments: tuple[str, ...], lines: list[str]) -> None:
    assert said(DIGITS, *arguments) == lines


def test_a_method_in_anothers_place_is_told_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"model": {"class_path": "methods.FedVPT", "init_args": {"num_prompts": 3}}})
    )
    files = (f"--config={tmp_path / 'mine.yaml'}", "--config=suites/digits")
    assert said(*files) == []
    (told,) = [each for each in said(*files, "--model=SingleSetVPT") if "num_prompts" in each]
    assert (
        told
        == "model: SingleSetVPT takes over num_prompts=3 from FedVPT; --model.init_args.num_prompts gives another value"
    )


def test_a_run_says_so_before_it_reads_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = [f"--config={CONF / 'base.yaml'}", f"--config={CONF / 'FedVPT.yaml'}", "--trainer.max_epochs=0"]
    partition = ["--data.partition=IID", "--data.partition.num_clients=4", "--data.partition=DirichletShared"]
    main(
        [
            "fit",
            *own,
            *partition,
            f"{PLACE}.alpha=9.0",
            f"{PLACE}.min_size=1",
            "--data.clients_per_round=2",
            f"--run_dir={tmp_path / 'run'}",
        ]
    )
    printed = capsys.readouterr().out.splitlines()
    place = printed.index(line("DirichletShared", "num_clients=4", "IID"))
    assert printed[place - 1] == "method: FedVPT"
