"""The notebooks in examples/notebooks run, cell by cell and without Jupyter, and what they show is true."""

import ast
import json
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
import torch.nn.functional as F
from fewer_images import fewer_digits
from lightning import seed_everything

from benchmark.backbones.vit import TimmViT
from benchmark.contract import Client, MiniBatch
from benchmark.federation import Round

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"
NAMES = ("from_training_to_use", "own_images", "own_method")
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def content(name: str) -> Any:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())


def texts(name: str, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in content(name)["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a notebook as a kernel does, in an empty folder, and gives what its cells leave."""
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    for folder in (here, temporary):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    plt.switch_backend("Agg")

    def run(name: str) -> dict[str, Any]:
        kernel = ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", kernel)
        for number, source in enumerate(texts(name, "code"), start=1):
            try:
                carry_out(source, f"{name}.ipynb, code cell {number}", vars(kernel))
            except Exception as error:
                pytest.fail(f"code cell {number} of {name}.ipynb ends in {type(error).__name__}: {error}\n\n{source}")
        plt.close("all")
        left = [*here.iterdir(), *(path for path in temporary.iterdir() if "wandb" not in path.name)]  # W&B's own
        assert left == [], "a notebook leaves no file"
        return vars(kernel)

    return run


def carry_out(source: str, called: str, names: dict[str, Any]) -> None:
    """Carry out a cell, and show the value of its last line."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), called, "exec"), names)
    if isinstance(last, ast.Expr):
        repr(eval(compile(ast.Expression(last.value), called, "eval"), names))


def test_a_cell_that_fails_is_shown(executed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "texts", lambda name, kind: ["number = 3", "print(number)\nnumber / 0"])
    with pytest.raises(pytest.fail.Exception, match=r"code cell 2 of own\.ipynb ends in ZeroDiv.*\n\nprint\(number"):
        executed("own")


def test_all_are_tested_here() -> None:
    assert tuple(sorted(path.stem for path in NOTEBOOKS.iterdir())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_has_no_outputs(name: str) -> None:
    made = content(name)
    assert (made["nbformat"], made["metadata"]["kernelspec"]["name"]) == (4, "python3")
    assert set(made["metadata"]) == {"kernelspec", "language_info"}
    assert 10 <= len(made["cells"]) <= 20
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    for cell in made["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            assert len(cell["source"]) <= 20
            assert max(len(line.rstrip("\n")) for line in cell["source"]) <= 120
    assert texts(name, "markdown")[0].startswith("# ")


@pytest.mark.parametrize("name", NAMES)
def test_pages_that_a_notebook_names_are_there(name: str) -> None:
    links = [link for text in texts(name, "markdown") for link in re.findall(r"\]\(([^)#]+)\)", text)]
    assert len(links) > 2
    assert [link for link in links if not (NOTEBOOKS / link).is_file()] == []


def test_a_folder_of_images_becomes_clients_that_learn(executed: Any) -> None:
    found = executed("own_images")
    data, scores, answers = found["data"], found["scores"], found["answers"]
    assert data.client_names == ["coloured", "ink", "outline"]
    assert [len(rows) for rows in data.splits.train] == [320] * 3  # of 400
    assert [len(rows) for rows in data.splits.test] == [80] * 3
    assert scores.index.tolist() == [0, 1, 2, 3, 4]
    assert scores.loc[4].min() > 0.5 > scores.loc[0].max()
    # What is shown in the picture is what was scored.
    rows = data.splits.test[2]
    true = [data.class_names[label] for label in data.pool.labels[torch.from_numpy(rows)]]
    right = [said == name for said, name in zip(answers["class"], true, strict=True)]
    assert found["right"] == right
    assert sum(right) / 80 == pytest.approx(scores.loc[4, "outline"])


def test_a_method_of_a_cell_is_checked_and_compared(executed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_digits(monkeypatch, train=2, test=6)
    found = executed("own_method")
    assert found["all_hold"] is True
    numbers = {name: run.record.communication["up_floats"] for name, run in found["runs"].items()}
    assert numbers == {"FedVPT": 10 * 96, "NearTokens": 9 * 96}  # tokens of the micro ViT's width
    for run in found["runs"].values():
        assert run.record.summary["server"]["test"]["accuracy"]["last"]["average"] > 0.5
    assert (found["away"]["value"] > 0).all()
    # The loss of its formula: each of the 9 x 96 numbers 0.1 from what was received is 8.64 away.
    seed_everything(0)
    method = found["NearTokens"](10, 6, TimmViT("micro_vit", "embedded"), mu=0.5)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    parameters = dict(method.named_parameters())
    received = {"tokens.tokens": parameters["tokens.tokens"].detach() - 0.1}
    client = Client(parameters, received, torch.zeros(10, dtype=torch.int64), Round(1, (0,), 0))
    loss, reported = method.client_loss(client, MiniBatch(x, y, torch.ones(4, dtype=torch.bool)))
    assert reported["away"].item() == pytest.approx(8.64, rel=1e-4)
    assert loss.item() == pytest.approx(F.cross_entropy(method(x), y).item() + 0.25 * 8.64, rel=1e-4)


def test_a_run_is_read_used_and_exported(executed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer_digits(monkeypatch, train=2, test=6)
    found = executed("from_training_to_use")
    scores, by_client, data = found["scores"], found["by_client"], found["run"].data
    assert list(by_client) == ["ink", "inverted", "coloured", "outline", "noise", "low_contrast"]
    # All test images of the client are asked about, so that its accuracy is the recorded one.
    assert len(found["answers"]) == len(data.splits.test[0])
    assert by_client["ink"] == pytest.approx(scores.loc["ink", "local"])
    assert by_client["ink"] > 0.5
    assert by_client["ink"] > by_client["inverted"]
    assert found["exported"] == found["answers"]["class"].tolist()
    assert {"model.pt2", "model.safetensors", "model.json"} == set(found["files"])
