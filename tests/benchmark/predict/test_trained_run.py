"""Finished runs of one method of each family, opened from their directories alone, and exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import TinyImages
from PIL import Image
from safetensors.torch import load_file
from trained_runs import Runs

from benchmark.errors import ConfigurationError
from benchmark.predict.trained_run import TrainedRun
from benchmark.records.stored_run import StoredRun, read_metrics
from benchmark.run.reload import client_values

#: By family one method of it.
METHODS = {
    "head alone": "HeadTune",
    "visual prompt": "FedVPT",
    "prompt on the pixels": "PFedPT",
    "text prompt": "PromptFL",
    "prompts of both towers": "FedMaPLe",
    "generated prompts": "PFedPG",
    "draws": "PFedBayesPT",
    "text and pixels": "TPFL",
    "low-rank text prompt": "FedPGP",
    "prompts of unequal length": "FedPHA",
    "a mean over the rounds": "FedPromptSRC",
    "a mixture for each image": "TRIP",
    "own prompts, merged": "PLAN",
    "from scratch": "FedAvg",
}


@pytest.mark.parametrize("family", METHODS)
def test_predictions_of_a_clients_test_images_are_those_of_the_record(
    family: str, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = runs(METHODS[family])
    monkeypatch.setattr(TinyImages, "load", None)  # the training data are gone
    data, opened = live.datamodule, TrainedRun(live.run_dir, device="cpu")
    recorded = read_metrics(live.run_dir).query("metric == 'accuracy' and split == 'test' and client >= 0")
    read_at = "local" if live.model.evaluate_local and live.model.paper_point == "local" else "server"
    scored = []
    for (point, client), accuracy in recorded.set_index(["point", "client"])["value"].dropna().items():
        rows = torch.from_numpy(data.held_out["test"][client])
        images = data.pool.images[rows]
        table = opened.predict(images, client, point)
        right = table["class"] == [data.class_names[label] for label in data.pool.labels[rows].tolist()]
        assert right.sum() == round(accuracy * len(rows))
        assert table["probability"].between(1 / 8, 1).all()
        logits = TrainedRun.of(live.model, data).client(client, point).logits(images[:3])
        assert torch.equal(opened.client(client, point).logits(images[:3]), logits)
        scored.append(point)
        if point == read_at:
            assert opened.client(client).point == point
    assert len(scored) == (10 if live.model.evaluate_local else 6)


@pytest.mark.parametrize(
    ("conf", "options"),
    [
        ("FedAvg", ("--data.label_orders=2",)),
        ("PromptFL", ("--data.partition=own_spaces.OwnSpaces", "--data.clients_per_round=5")),
    ],
    ids=["orders", "spaces"],
)
def test_clients_that_tell_different_classes_apart_are_asked_by_name(
    conf: str, options: tuple[str, ...], runs: Runs
) -> None:
    run = TrainedRun(runs(conf, *options).run_dir, device="cpu")
    assert run.client(0).class_names != run.client(1).class_names
    with pytest.raises(ConfigurationError, match=r"tell different classes apart, or .*; say which one: client 0, clie"):
        run.client()


def test_clients_who_are_read_after_local_training_are_asked_by_name(runs: Runs) -> None:
    run = TrainedRun(runs("FedAvg", "--model=trained_runs.Averaged").run_dir, device="cpu")
    with pytest.raises(ConfigurationError, match="Averaged has a model for each client; say which one: client 0, clie"):
        run.client()
    assert run.client(point="server").point == "server"


class Elsewhere(torch.Tensor):
    """Pixels that NumPy cannot read where they are, as those on a GPU."""

    def cpu(self, *more: Any) -> torch.Tensor:
        """Copy them."""
        return self.as_subclass(torch.Tensor)

    def numpy(self, **more: Any) -> Any:
        """Refuse, as of a GPU."""
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def test_pixels_may_lie_on_a_gpu_and_top_is_at_least_one(runs: Runs) -> None:
    live = runs("FedAvg")
    run, images = TrainedRun(live.run_dir, device="cpu"), live.datamodule.pool.images[:3]
    assert run.predict(images.as_subclass(Elsewhere)).equals(run.predict(images))
    for top in (0, -2, True, 1.5):
        with pytest.raises(ConfigurationError, match=f"top says how many .* from 1 on; got {top}"):
            run.predict(images, top=top)  # type: ignore[arg-type]


def test_a_run_under_autocast_is_exported_in_float32(runs: Runs, tmp_path: Path) -> None:
    live = runs("PromptFL", "--trainer.precision=bf16-mixed")
    run, images = TrainedRun(live.run_dir, device="cpu"), live.datamodule.pool.images[:3]
    model = run.client(0)
    run.export(tmp_path / "model", 0)
    assert json.loads((tmp_path / "model/model.json").read_text())["precision"] == {
        "graph": "float32",
        "run": "bf16-mixed",
    }
    found = torch.export.load(tmp_path / "model/model.pt2").module()(images)
    torch.testing.assert_close(found, model.without_autocast().logits(images), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found, model.logits(images), rtol=0.1, atol=0.1)
    assert not torch.allclose(found, model.logits(images), atol=1e-5)  # those of the evaluation, as before
    plain = TrainedRun(runs("FedAvg").run_dir, device="cpu").client()
    assert plain.without_autocast() is plain


def test_an_export_that_fails_leaves_the_older_one(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> bytes:
        raise ConfigurationError("no ONNX")

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    run, folder = TrainedRun(runs("FedAvg").run_dir, device="cpu"), tmp_path / "model"
    for name in ("check_onnx", "_check"):
        monkeypatch.setattr(f"benchmark.predict.export.{name}", lambda *_: None)
    monkeypatch.setattr("benchmark.predict.export._onnx", lambda *_: b"first")
    run.export(folder, 0, onnx=True)
    before = files()
    assert before["model.onnx"] == b"first"
    with monkeypatch.context() as patch:
        patch.setattr("benchmark.predict.export._onnx", refuses)
        with pytest.raises(ConfigurationError, match="no ONNX"):
            run.export(folder, 1, onnx=True, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch.export, "save", refuses)
        with pytest.raises(ConfigurationError, match="no ONNX"):
            run.export(folder, 1, overwrite=True)
    assert files() == before
    with monkeypatch.context() as patch:
        patch.setattr("benchmark.predict.export._sha256", refuses)
        with pytest.raises(ConfigurationError, match="no ONNX"):
            run.export(folder, 1, overwrite=True)
    assert files().keys() == {"model.pt2", "model.safetensors"}
    run.export(folder, 1, overwrite=True)
    assert files().keys() == {"model.json", "model.pt2", "model.safetensors"}


BASE_TO_NOVEL = ("--data.partition=datamodules.BaseToNovel", "--data.partition.num_clients=4")


def test_a_new_client_of_base_to_novel_is_asked_about_the_base_classes(runs: Runs, tmp_path: Path) -> None:
    live = runs("PromptFL", *BASE_TO_NOVEL)
    run, data = TrainedRun(live.run_dir, device="cpu"), live.datamodule
    rows = data.held_out["test"][0]
    for row in rows:
        folder = tmp_path / "ward" / data.class_names[data.pool.labels[row]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.pool.images[row].permute(1, 2, 0).numpy()).save(folder / f"{row}.png")
    new, known = run.new_client(tmp_path / "ward"), run.client(0)
    assert new.class_names == known.class_names == ("class0", "class1", "class2", "class3")
    images = data.pool.images[torch.from_numpy(rows)]
    torch.testing.assert_close(new.logits(images), known.logits(images), rtol=0, atol=0)


def test_labels_are_named_in_the_label_space_of_their_split(runs: Runs) -> None:
    stored = StoredRun(runs("PromptFL", *BASE_TO_NOVEL).run_dir)
    assert stored.class_names(4) == stored.class_names(4, "val") == ["class0", "class1", "class2", "class3"]
    assert stored.class_names(4, "novel") == ["class4", "class5", "class6", "class7"]
    assert stored.class_names(3) == ["label 0", "label 1", "label 2"]
    own = StoredRun(runs("PromptFL", "--data.partition=own_spaces.OwnSpaces", "--data.clients_per_round=5").run_dir)
    assert own.class_names(3) == ["label 0", "label 1", "label 2"]


def test_a_tester_of_a_method_that_fits_copies_is_asked_as_it_is(runs: Runs, tmp_path: Path) -> None:
    live = runs("PromptFLFT", "--data.partition=own_spaces.OwnSpaces", "--data.clients_per_round=5")
    run, data, table = TrainedRun(live.run_dir, device="cpu"), live.datamodule, read_metrics(live.run_dir)
    for client, split in ((6, "whole"), (7, "apart")):
        rows = torch.from_numpy(data.held_out[split][client])
        found = run.predict(data.pool.images[rows], client)["class"]
        right = found == [data.class_names[label] for label in data.pool.labels[rows]]
        recorded = table.query(f"client == {client} and metric == 'accuracy' and split == {split!r}")["value"]
        assert right.sum() == round(recorded.iloc[-1] * len(rows))
    run.export(tmp_path / "model", 7)
    assert not run.has_data  # a tester has no training images


#: Of them, what is different as a graph: a CNN, a ViT with draws, a CLIP's image tower.
EXPORTED = ("prompt on the pixels", "draws", "prompts of both towers")


@pytest.mark.parametrize("family", EXPORTED)
def test_an_exported_client_needs_none_of_this_code(
    family: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = []
    save = torch.export.save
    monkeypatch.setattr(torch.export, "save", lambda program, file: (programs.append(program), save(program, file)))
    live = runs(METHODS[family])
    opened = TrainedRun(live.run_dir, device="cpu")
    model = opened.client(2)
    written = opened.export(tmp_path / "model", "client 2")
    assert sorted(path.name for path in written) == ["model.json", "model.pt2", "model.safetensors"]
    graph = programs[0].module()  # what was written: to read a file takes seconds, which test_using_page.py does
    rows = torch.from_numpy(live.datamodule.held_out["test"][2])
    for count in (1, len(rows)):
        images = live.datamodule.pool.images[rows[:count]]
        expected = model.logits(images)
        torch.testing.assert_close(graph(images), expected, rtol=1e-6, atol=1e-5)
    about = json.loads((tmp_path / "model/model.json").read_text())
    assert about["class_names"] == list(live.datamodule.class_names)
    assert (about["method"], about["client"], about["point"]) == (METHODS[family], "client 2", model.point)
    held = load_file(tmp_path / "model/model.safetensors")
    torch.testing.assert_close(held, client_values(live.model, 2, model.point), rtol=0, atol=0)
    size = (tmp_path / "model/model.pt2").stat().st_size
    assert size < 4 * sum(value.numel() for value in live.model.parameters()) + 3e6
