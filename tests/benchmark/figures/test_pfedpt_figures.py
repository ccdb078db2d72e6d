import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from federation import CONF
from PIL import Image

from benchmark import commands
from benchmark.errors import ConfigurationError
from benchmark.figures.pfedpt import NAMES, tsne
from benchmark.figures.pfedpt import make as pfedpt_figures
from benchmark.figures.pfedpt.attention import share_on_prompt
from benchmark.figures.pfedpt.labels import own_and_others, total_variation
from benchmark.figures.pfedpt.make import CONFIG, FIGURES, PARTITION, FigureFiles, make_figure
from benchmark.figures.pfedpt.movement import movement
from benchmark.figures.pfedpt.prompts import outputs_under_prompts, plain_images
from benchmark.figures.pfedpt.sizes import sizes_by_template
from benchmark.figures.pfedpt.tsne import embedded, plain_colours
from benchmark.records.stored_run import read_metrics
from benchmark.run.cli import main
from benchmark.run.reload import become_client, restore
from benchmark.tables.cells import make_cell
from benchmark.tables.layout import load_table

ROOT = Path(__file__).parents[3]
MOVEMENT = (
    '--trainer.callbacks=[{"class_path": "benchmark.run.parameter_movement.PersonalMovement", '
    '"init_args": {"parameters": ["visual_prompt"]}}]'
)


def run(folder: Path, conf: str, *overrides: str) -> Path:
    given = ["--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml"), "--run_dir", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-cli"])
        main(["fit", *given, "--trainer.max_epochs=2", "--data.new_clients=0.2", *overrides])
    return folder


@pytest.fixture(scope="module")
def pfedpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("figures") / "pfedpt", "PFedPT", MOVEMENT)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("figures") / "fedavg", "FedAvg")


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tsne, "PLAIN_IMAGES", 12)


def drawn(name: str, results: Path, *runs: Path) -> tuple[pd.DataFrame, str]:
    """Make a figure, check its files, return numbers and caption."""
    files = make_figure(name, run_dirs=runs, results_dir=results)
    stem = f"{name}_{runs[0].name}"
    assert sorted(path.name for path in (results / "figures").iterdir()) == [
        f"{stem}.{s}" for s in ("csv", "png", "txt")
    ]
    with Image.open(files.png) as image:
        assert image.format == "PNG"
        assert image.width > 600
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20  # drawn, not blank
    caption = files.txt.read_text()
    assert caption.endswith(", ".join(path.name for path in runs) + ".\n")
    return pd.read_csv(files.csv), caption


# --- every figure of a tiny run ---------------------------------------------------------------------------------------


def test_fig4_shows_predictions_with_and_without_the_prompt(pfedpt: Path, at_root: None, tmp_path: Path) -> None:
    pytest.importorskip("captum")
    numbers, caption = drawn("pfedpt_fig4", tmp_path, pfedpt, pfedpt)
    method, data = restore(pfedpt)
    assert len(numbers) == 4 * 2 * 2
    for _, row in numbers.iterrows():
        become_client(method, row["client"])
        assert row["image"] == data.held_out["test"][row["client"]][0]
        x, y = data.transform(data.pool.images[[row["image"]]], None), int(data.pool.labels[row["image"]])
        with torch.no_grad():
            chances = method(method.prompted(x, {}) if row["prompt"] == "with" else x).softmax(1)[0]  # type: ignore[operator]
        assert row["probability_of_class"] == pytest.approx(float(chances[y]), abs=1e-5)
        assert row["predicted"] == data.class_names[int(chances.argmax())].replace("_", " ")
        assert 0 <= row["map_on_prompt_region"] <= 1 or math.isnan(row["map_on_prompt_region"])
    assert "Grad-CAM of the true class" in caption


def test_fig5_has_every_training_client_and_colour(pfedpt: Path, at_root: None, tmp_path: Path) -> None:
    numbers, caption = drawn("pfedpt_fig5", tmp_path, pfedpt)
    data = restore(pfedpt)[1]
    assert len(data.training_clients) == 9
    assert len(numbers) == 9 * 12
    assert set(numbers["client"]) == set(data.training_clients)
    colours = plain_colours(12, data.seed)
    assert (
        numbers[numbers["client"] == data.training_clients[3]][["red", "green", "blue"]].to_numpy() == colours
    ).all()
    assert "Mean silhouette of the clients' groups (in logits; 1: apart, 0 and below: mixed): " in caption


def test_fig9_sets_labels_beside_outputs(pfedpt: Path, at_root: None, tmp_path: Path) -> None:
    numbers, caption = drawn("pfedpt_fig9", tmp_path, pfedpt)
    method, data = restore(pfedpt)
    client = data.training_clients[1]
    own = numbers[numbers["client"] == client]
    labels = data.pool.labels.numpy()[data.train_indices[client]]
    np.testing.assert_allclose(own["label_share"], [np.mean(labels == c) for c in range(8)], atol=1e-6)
    become_client(method, client)
    grey = torch.full((1, 3, 16, 16), 128 / 255).sub(0.5).div(0.5)
    with torch.no_grad():
        expected = method(method.prompted(grey, {})).softmax(1)[0]  # type: ignore[operator]
    np.testing.assert_allclose(own["output"], expected, atol=1e-5)
    shares, outputs = (numbers[name].to_numpy().reshape(9, 8) for name in ("label_share", "output"))
    mean = np.mean([np.abs(p - q).sum() / 2 for p, q in zip(shares, outputs, strict=True)])
    assert f"all 9 clients: {mean:.2f} to the client's own labels" in caption


def test_fig10_is_what_the_run_recorded(pfedpt: Path, at_root: None, tmp_path: Path) -> None:
    numbers, _ = drawn("pfedpt_fig10", tmp_path, pfedpt)
    method = restore(pfedpt)[0]
    assert list(numbers.columns) == ["round", "client", "change", "distance"]
    assert len(numbers) == 2 * 11
    last = numbers[numbers["round"] == 2].set_index("client")["distance"]
    for client in range(11):
        start = {name: method.get_parameter(name).clone() for name in method.roles.personal}
        square = sum(float((method.store.all_rows(n)[client] - v).square().sum()) for n, v in start.items())  # type: ignore[union-attr]
        assert last[client] == pytest.approx(square**0.5, rel=1e-4)


def test_fig11_is_what_the_runs_scored_on_new_clients(
    fedavg: Path, at_root: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    runs = {}
    for epochs in (0, 3):
        given = ["--model.init_args.finetuned=head", f"--model.init_args.finetuning={{lr: 0.1, epochs: {epochs}}}"]
        runs[epochs] = run(tmp_path_factory.mktemp("newcomers") / f"after_{epochs}", "FedAvgFT", *given)
    numbers, caption = drawn("pfedpt_fig11", tmp_path, runs[3], runs[0])
    assert len(numbers) == 2 * 2  # epochs, new clients
    data = restore(fedavg)[1]
    for epochs, path in (*runs.items(), (0, fedavg)):  # before any epoch it is the federated model
        metrics = read_metrics(path)
        new = metrics[(metrics["split"] == "new") & (metrics["metric"] == "accuracy") & (metrics["round"] == 2)]
        part = numbers[(numbers["adapted"] == "FedAvg, last layer") & (numbers["epoch"] == epochs)]
        assert dict(zip(part["client"], part["accuracy"], strict=True)) == pytest.approx(
            dict(zip(new["client"], new["value"], strict=True)), abs=1e-5
        )
        assert list(part["training_images"]) == [len(data.train_indices[client]) for client in part["client"]]
    assert "2 clients that never trained" in caption
    assert "after 0, " in caption


def test_fig8_counts_every_image(at_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_table(CONFIG)
    preset = whole.presets["demo"]
    fewer = replace(whole, presets={"demo": replace(preset, data=[preset.data[0], preset.data[4]])})
    monkeypatch.setattr(pfedpt_figures, "load_table", lambda name: fewer)
    files = make_figure("pfedpt_fig8", results_dir=tmp_path)
    assert files.png.name == "pfedpt_fig8_demo.png"
    assert files.txt.read_text().startswith("Demo: ")
    totals = pd.read_csv(files.csv).groupby("partition")["training_images"].sum()
    assert len(totals) == 2
    assert totals["iid, even"] == totals["5 of 10 classes, at random"] == 1438  # the official training images


def test_fig6_reads_template_and_size_from_the_tables_rows(
    at_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = ["Padding, p=2", "Padding, p=4", "Fixed patch, p=2"]
    table = pd.DataFrame({"kind": "column", "column": "Pooled", "method": labels, "ours": [40.0, 42.5, 39.0]})
    table = pd.concat([table.assign(std=math.nan, rounds="15"), table.assign(kind="statistic")])
    found = sizes_by_template(table)
    assert found.drop(columns="std").to_dict("list") == {
        "template": ["Padding", "Padding", "Fixed patch"],
        "size": [2, 4, 2],
        "accuracy": [40.0, 42.5, 39.0],
        "rounds": ["15", "15", "15"],
    }
    with pytest.raises(ConfigurationError, match="rows named 'Template, p=size'"):
        sizes_by_template(table.assign(method="pFedPT"))

    class Made:
        csv = tmp_path / "pfedpt_fig6_demo.csv"
        failed: dict[str, Any] = {}  # noqa: RUF012

    table.to_csv(Made.csv, index=False)
    monkeypatch.setattr(pfedpt_figures, "run_table", lambda *arguments, **named: Made)
    files = make_figure("pfedpt_fig6", results_dir=tmp_path)
    assert "best of 15 rounds, chosen on test data" in files.txt.read_text()
    assert len(pd.read_csv(files.csv)) == 3


# --- the numbers by hand ----------------------------------------------------------------------------------------------


def test_distances_of_distributions_by_hand() -> None:
    p, q = np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.0, 1.0], [0.5, 0.5]])
    assert total_variation(p, q).tolist() == [1.0, 0.0]
    own, others = own_and_others(p, q)
    assert (own, others) == (0.5, 0.5)  # own: 1 and 0; others: output 0 to shares 1, output 1 to shares 0
    assert math.isnan(own_and_others(p[:1], q[:1])[1])


def test_groups_of_outputs_that_are_apart_have_a_high_silhouette() -> None:
    outputs = torch.randn(2, 10, 4, generator=torch.manual_seed(0)) + 50 * torch.eye(4)[:2, None]
    places, score = embedded(outputs, seed=0)
    assert places.shape == (2, 10, 2)
    assert score > 0.9
    again, _ = embedded(outputs, seed=0)
    assert (places == again).all()


def test_plain_images_are_of_one_colour_each(pfedpt: Path) -> None:
    data = restore(pfedpt)[1]
    x = plain_images(np.array([[0, 255, 51]], dtype=np.uint8), data)
    assert x.shape == (1, 3, 16, 16)
    torch.testing.assert_close(x[0, :, 3, 5], torch.tensor([-1.0, 1.0, -0.6]))
    assert (x == x[:, :, :1, :1]).all()


def test_outputs_differ_by_prompt_alone(pfedpt: Path) -> None:
    method, data = restore(pfedpt)
    x = plain_images(plain_colours(3, 0), data)
    outputs = outputs_under_prompts(method, [0, 2, 0], x, 0)  # type: ignore[arg-type]
    assert outputs.shape == (3, 3, 8)
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_the_share_of_a_map_on_the_frame(pfedpt: Path) -> None:
    method = restore(pfedpt)[0]
    maps = torch.zeros(3, 16, 16)
    maps[0] = 1.0
    maps[1, 0, 0], maps[1, 8, 8] = 3.0, 1.0
    shares = share_on_prompt(method, maps, 0)  # type: ignore[arg-type]
    assert shares[:2].tolist() == [1 - 10 * 10 / 256, 0.75]
    assert shares[2].isnan()


def test_movement_asks_for_the_callback(fedavg: Path) -> None:
    callback = r"benchmark\.run\.parameter_movement\.PersonalMovement"
    with pytest.raises(ConfigurationError, match=rf"run it with the callback {callback}"):
        movement(read_metrics(fedavg))


# --- what can go wrong, in one line -----------------------------------------------------------------------------------


def test_bad_input_is_refused_before_anything_runs(
    pfedpt: Path, fedavg: Path, at_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, *arguments: Any, **named: Any) -> None:
        with pytest.raises(ConfigurationError, match=message):
            make_figure(*arguments, results_dir=tmp_path, runs_dir=tmp_path / "runs", **named)
        assert not list(tmp_path.iterdir())

    refused("there is no figure 'fig4'.*; figures are pfedpt_fig4, pfedpt_fig5", "fig4")
    refused("has no preset 'huge'; it has demo, paper", "pfedpt_fig5", "huge")
    refused(r"the preset paper of pfedpt_fig5 reads data sets: give .* --data_dir", "pfedpt_fig5", "paper")
    refused(r"the preset paper of pfedpt_fig8 reads data sets", "pfedpt_fig8", "paper")
    refused(r"drawn from 2 \(pFedPT, CNN; pFedPT, ViT\) runs, got 1", "pfedpt_fig4", run_dirs=[pfedpt])
    refused("is a run of FedAvg; this figure needs runs of FedAvgFT", "pfedpt_fig11", run_dirs=[fedavg])
    refused("drawn from none runs, got 1", "pfedpt_fig8", run_dirs=[pfedpt])
    refused("is a run of FedAvg; this figure needs FedAvg .* with a prompt", "pfedpt_fig9", run_dirs=[fedavg])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(r"Grad-CAM needs captum: pip install 'federated-prompt-benchmark\[figures\]'", "pfedpt_fig4")


def test_the_command_draws_several_and_says_where(
    pfedpt: Path, at_root: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.main(["figure", "fig5"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("benchmark: there is no figure 'fig5'")
    assert "; figures are pfedpt_fig4, " in said
    called: list[tuple[Any, ...]] = []

    def fake(*arguments: Any, rerun_changed: bool) -> FigureFiles:
        called.append((*arguments, rerun_changed))
        return FigureFiles(*(Path(f"{arguments[0]}.{suffix}") for suffix in ("png", "csv", "txt")))

    monkeypatch.setattr(pfedpt_figures, "make_figure", fake)
    given = ["figure", "pfedpt_fig5", "pfedpt_fig9", "--preset", "paper", "--data_dir", "/data", "--run_dir", "a"]
    assert commands.main(given) == 0
    assert called == [(f"pfedpt_fig{n}", "paper", "/data", [Path("a")], None, False) for n in (5, 9)]
    assert capsys.readouterr().out.splitlines()[1] == "written: pfedpt_fig9.png, pfedpt_fig9.csv, pfedpt_fig9.txt"
    assert commands.main(["figure", "pfedpt_fig5", "--rerun-changed"]) == 0
    assert called[-1] == ("pfedpt_fig5", "demo", None, [], None, True)


def test_a_run_that_fails_or_kept_no_checkpoint(pfedpt: Path, at_root: None, tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import sys; sys.exit('error: no such luck')"]
    with pytest.raises(
        ConfigurationError, match=r"the run pfedpt_cnn-digits_dir03-s0-\w{8} failed: error: no such luck"
    ):
        make_figure("pfedpt_fig5", results_dir=tmp_path, runs_dir=tmp_path / "runs", program=program)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.yaml").write_bytes((pfedpt / "config.yaml").read_bytes())
    with pytest.raises(ConfigurationError, match=r"bare has no checkpoints/last\.ckpt"):
        make_figure("pfedpt_fig5", results_dir=tmp_path, run_dirs=[bare])
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize("name", ["demo", "paper"])
def test_the_presets_name_what_is_there(name: str, at_root: None) -> None:
    assert tuple(FIGURES) == NAMES
    for spec in FIGURES.values():
        table = load_table(spec.table)
        assert set(spec.rows or ()) <= {row.label for row in table.rows}
        for group in table.presets[name].data:
            for row in table.rows:
                cell = make_cell(row, name, table.presets[name], group, 0)
                for path in [*cell.configs, *(e.partition("=")[2] for e in cell.overrides if e.startswith("--data="))]:
                    assert Path(path).is_file(), path
    table = load_table(CONFIG)
    assert set(FIGURES["pfedpt_fig4"].rows or ()) == {row.label for row in table.rows}
    assert len(table.presets[name].data) == 6
    assert [group.label for group in table.presets[name].data].count(PARTITION) == 1
