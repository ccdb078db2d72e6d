"""The commands predict and export, on images in files."""

import csv
import hashlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import TinyImages
from PIL import Image
from refusal import refused
from trained_runs import Runs

from benchmark.commands import main
from benchmark.predict.answers import csv_line, csv_path
from benchmark.predict.trained_run import TrainedRun, predictions
from benchmark.records.hashes import canonical
from benchmark.records.stored_run import read_metrics


def saved(data: Any, rows: Any, folder: Path) -> list[Path]:
    """Images of a pool as files, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:02}.png" for number in range(len(rows))]
    for path, row in zip(paths, rows, strict=True):
        Image.fromarray(data.pool.images[row].permute(1, 2, 0).numpy()).save(path)
    return paths


def table(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_files_are_classified_in_order_and_what_cannot_be_read_is_told(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = runs("PFedBayesPT")
    monkeypatch.setattr(TinyImages, "load", None)
    data, rows = live.datamodule, live.datamodule.held_out["test"][0]
    images = tmp_path / "images"
    paths = saved(data, rows[:2], images) + saved(data, rows[2:], images / "more")
    (images / "01b.png").write_text("no image")  # and the draws of those behind it are still theirs
    (images / "scan.dcm").write_text("")
    (images / "notes.txt").write_text("")
    (images / ".hidden.png").write_text("")
    out = tmp_path / "out.csv"
    capsys.readouterr()
    command = ["predict", str(live.run_dir), str(images), "--client=client 0", f"--out={out}", "--top=2", "--all"]
    assert main(command) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "PFedBayesPT, round 1, client 0 (client 0), after aggregation"
    assert next(line for line in said if "01b.png" in line).startswith("left out: cannot decode the image")
    assert any("1 images in" in line and "scan.dcm" in line for line in said)
    assert said[-1] == f"{len(rows)} images classified, written: {out}"
    found = table(out.read_text())
    assert [row["path"] for row in found] == [str(path) for path in paths]
    expected = TrainedRun(live.run_dir).client(0)
    step = expected.step
    logits = torch.cat([expected.logits(data.pool.images[rows[n : n + step]], n // step) for n in range(0, 6, step)])
    every = np.array([[float(row[f"p({name})"]) for name in data.class_names] for row in found])
    np.testing.assert_allclose(every, logits.softmax(1).numpy(), rtol=1e-4)
    for row, of_image in zip(found, logits, strict=True):
        first, second = of_image.topk(2).indices.tolist()
        assert (row["class"], row["class_2"]) == (data.class_names[first], data.class_names[second])
        assert float(row["probability_2"]) == pytest.approx(of_image.softmax(0)[second].item(), rel=1e-4)
    recorded = read_metrics(live.run_dir).query("client == 0 and point == 'server' and metric == 'accuracy'")
    labels = [data.class_names[label] for label in data.pool.labels[rows]]
    right = sum(row["class"] == label for row, label in zip(found, labels, strict=True))
    assert right == round(recorded["value"].item() * len(rows))


def test_a_list_of_images_is_read_and_one_model_of_all_needs_no_client(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = runs("FedAvg")
    paths = saved(live.datamodule, live.datamodule.held_out["test"][2], tmp_path / "images")
    (tmp_path / "list.csv").write_text("label,path\n" + "".join(f"x,images/{path.name}\n" for path in paths))
    capsys.readouterr()
    assert main(["predict", str(live.run_dir), str(tmp_path / "list.csv"), "--batch_size=1"]) == 0
    shown = capsys.readouterr()
    assert "FedAvg, round 1, the one model of all clients, after aggregation" in shown.err
    assert [row["path"] for row in table(shown.out)] == [str(path) for path in paths]
    of_client = TrainedRun(live.run_dir).predict(paths, 5)
    assert [row["class"] for row in table(shown.out)] == of_client["class"].tolist()
    assert live.model.simulation is not None
    assert TrainedRun.of(live.model, live.datamodule).predict(tmp_path / "images").equals(of_client)


def test_no_cell_is_a_formula() -> None:
    for start in "=+-@":
        assert csv_path(f"{start}cmd.png") == f"./{start}cmd.png"
        assert csv_line(csv_path(f"{start}cmd.png"), f"{start}1", 0.5) == f"./{start}cmd.png,'{start}1,0.5\n"
    assert csv_line('a"b,c\nd.png', "x") == '"a""b,c\nd.png",x\n'
    assert csv_line("plain.png", "two words", 1e-9) == "plain.png,two words,1e-09\n"


def test_a_new_client_is_fitted_first_as_the_method_says(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = runs("HeadTune")
    data = live.datamodule
    rows = [int(row) for row in data.train_indices[2]]
    for row in rows:
        name = data.class_names[data.pool.labels[row]].replace("class", "Class ")
        saved(data, [row], tmp_path / "ward" / name)
        (tmp_path / "ward" / name / "00.png").rename(tmp_path / "ward" / name / f"{row}.png")
    run = TrainedRun(live.run_dir)
    model = run.new_client(tmp_path / "ward")
    assert (model.name, model.client, model.split) == ("ward", 6, "new")
    labels = data.pool.labels[rows]
    assert (model.logits(data.pool.images[rows]).argmax(1) == labels).double().mean() > 0.9
    assert (run.client(2).logits(data.pool.images[rows]).argmax(1) == labels).double().mean() < 0.9
    capsys.readouterr()
    assert main(["predict", str(live.run_dir), str(tmp_path / "ward"), "--new_client", str(tmp_path / "ward")]) == 0
    shown = capsys.readouterr()
    assert f"new client ward, fitted on {len(rows)} images" in shown.err
    assert [row["class"] for row in table(shown.out)] == predictions(model, tmp_path / "ward")["class"].tolist()
    (tmp_path / "ward" / "moon").mkdir()
    line = refused(capsys, main, ["predict", str(live.run_dir), str(tmp_path), f"--new_client={tmp_path / 'ward'}"])
    assert "ward has moon, of which the run knows nothing; expected folders named as the run's classes: class0" in line


def test_a_new_client_is_what_the_run_would_have_made_of_it(runs: Runs, tmp_path: Path) -> None:
    """The rule adapts a descriptor in five phases; with this generator others' starts do not depend on how many."""
    options = ("--model.init_args.generator=adain", "--data.batch_size=8", "--data.partition.init_args.num_clients")
    known = runs("PFedPG", *options[:2], f"{options[2]}=6", "--data.new_clients=0.17", "--data.partition_seed=1")
    other = runs("PFedPG", *options[:2], f"{options[2]}=5")
    data = known.datamodule
    assert data.new_clients == [5]
    for row in data.train_indices[5].tolist():
        saved(data, [row], tmp_path / "ward" / data.class_names[data.pool.labels[row]])
    test = torch.from_numpy(data.held_out["new"][5])
    model = TrainedRun(other.run_dir).new_client(tmp_path / "ward")
    found = model.logits(data.pool.images[test])
    torch.testing.assert_close(found, TrainedRun(known.run_dir).client(5).logits(data.pool.images[test]))
    recorded = read_metrics(known.run_dir).query("client == 5 and split == 'new' and metric == 'accuracy'")["value"]
    assert (found.argmax(1) == data.pool.labels[test]).sum() == round(recorded.item() * len(test))
    start = TrainedRun(other.run_dir).client(0, "server").logits(data.pool.images[test])
    assert not torch.allclose(found, start, atol=1e-2)


@pytest.mark.parametrize("conf", ["PFedPG", "PFedBayesPT"])
def test_clients_of_the_run_that_never_train_are_fitted_as_they_were(conf: str, runs: Runs) -> None:
    live = runs(conf, "--data.new_clients=0.34", "--data.clients_per_round=2", "--data.clients_at_once=1")
    run = TrainedRun(live.run_dir)
    recorded = read_metrics(live.run_dir).query("split == 'new' and metric == 'accuracy' and client >= 0")
    assert len(recorded) == 2
    for client, accuracy in recorded.set_index("client")["value"].items():
        rows = torch.from_numpy(live.datamodule.held_out["new"][client])
        found = run.predict(live.datamodule.pool.images[rows], client)["class"]
        right = found == [live.datamodule.class_names[label] for label in live.datamodule.pool.labels[rows]]
        assert right.sum() == round(accuracy * len(rows))


def test_what_is_asked_of_the_training_images_reads_them(
    runs: Runs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for conf in ("FedAvgFT", "PFedPrompt", "NearestClassMean"):
        live = runs(conf)
        recorded = read_metrics(live.run_dir).query("split == 'test' and metric == 'accuracy' and client == 2")
        rows = torch.from_numpy(live.datamodule.held_out["test"][2])
        images, labels = live.datamodule.pool.images[rows], live.datamodule.pool.labels[rows]
        right = (TrainedRun(live.run_dir).client(2).logits(images).argmax(1) == labels).sum()
        assert right == round(recorded["value"].item() * len(rows))
    monkeypatch.setattr(TinyImages, "load", _gone)
    line = refused(capsys, main, ["predict", str(runs("FedAvgFT").run_dir), str(CONF_IMAGE), "--client=2"])
    assert "FedAvgFT fits a copy of a client on its training images before it predicts, so the run's data are" in line
    assert "TinyImages is not in data" in line


def _gone(source: TinyImages) -> Any:
    raise source.missing("TinyImages is not in data")


CONF_IMAGE = Path(__file__).parents[3] / "results/figures"


def test_bad_input_to_both_commands_is_one_line(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = runs("PFedPG")
    run, image = str(live.run_dir), str(saved(live.datamodule, [0], tmp_path / "images")[0])
    (tmp_path / "there.csv").write_text("kept")
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.csv").write_text("label\n1\n")
    (tmp_path / "bad.png").write_text("no image")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").write_text("")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    client = "--client=client 2"
    absent = live.model.store.all_rows("participated").tolist().index(0)
    for arguments, expected in {
        ("predict", run, image): "PFedPG has a model for each client; say which one: client 0, client 1, client 2, c",
        ("predict", run, image, "--client=moon"): "there is no client 'moon'; there are client 0, client 1, client 2, ",
        ("predict", run, image, "--client=6"): "there is no client '6'; there are client 0, client 1, client 2, clien",
        ("predict", run, str(tmp_path / "none.png"), client): "none.png; give an image, a folder of images, or a list",
        ("predict", run, str(tmp_path / "empty"), client): "empty holds no image (.jpg, .jpeg",
        ("predict", run, str(tmp_path / "list.csv"), client): "list.csv has no column path",
        ("predict", run, str(tmp_path / "bad.png"), client): "none of the images could be read",
        ("predict", run, image, client, f"--out={tmp_path / 'there.csv'}"): "there.csv exists; give another --out, or",
        ("predict", run, image, client, "--device=tpu"): "there is no device 'tpu' here; give auto, cpu",
        ("predict", run, image, f"--client={absent}", "--point=local"): f"client {absent} has never trained; ask for",
        ("predict", run, image, client, f"--new_client={tmp_path}"): "--new_client is a client of its own",
        ("predict", run, image, f"--new_client={tmp_path / 'empty'}"): "empty holds no folder of a class; expected fo",
        ("predict", image, image, client): "00.png is no folder; give the directory that the run named when it began",
        ("predict", str(tmp_path), image, client): "holds no config.yaml, as a run directory does; give the directory",
        ("export", run, str(tmp_path / "full"), client): "full is not empty; give another folder, or --overwrite",
        ("export", run, image, client): "00.png is no folder; give one to write the model's files into",
        ("export", run, str(tmp_path / "m"), client, "--onnx"): "pip install 'federated-prompt-benchmark[onnx]'",
    }.items():
        assert expected in refused(capsys, main, list(arguments))
    assert (tmp_path / "there.csv").read_text() == "kept"
    assert not (tmp_path / "m").exists()


def test_a_run_without_its_facts_or_with_changed_ones_is_one_line(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = runs("PFedPG")
    image = saved(live.datamodule, [0], tmp_path / "images")[0]
    old = tmp_path / "old"
    shutil.copytree(live.run_dir, old)
    facts = json.loads((old / "federation.json").read_text())
    (old / "federation.json").write_text(json.dumps(facts | {"class_names": ["cat"] * 8}))
    command = ["predict", str(old), str(image), "--client=2"]
    line = refused(capsys, main, command)
    assert "federation.json can't be used (it was changed after it was written); take an unchanged copy" in line
    for wrong in ({"train_sizes": [1] * 6}, {"image_size": [10**6] * 2}, {"client_names": ["a"]}, {"terms": None}):
        made_anew = {name: value for name, value in facts.items() if name != "sha256"} | wrong
        made_anew["sha256"] = hashlib.sha256(canonical(made_anew)).hexdigest()
        (old / "federation.json").write_bytes(canonical(made_anew))
        assert "federation.json can't be used (" in refused(capsys, main, command)
    (old / "federation.json").unlink()  # as in an older run
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown == predicted(live.run_dir, image, capsys)
    monkeypatch.setattr(TinyImages, "load", _gone)
    line = refused(capsys, main, command)
    assert (
        "old is of an older version, which left no federation.json, so the run's data are needed (elsewhere: " in line
    )
    (old / "checkpoints/last.ckpt").unlink()
    shutil.copy(live.run_dir / "federation.json", old)
    assert "old has no checkpoints/last.ckpt" in refused(capsys, main, command)


def predicted(run_dir: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["predict", str(run_dir), str(image), "--client=2"]) == 0
    return capsys.readouterr().out


def test_an_export_is_written_over_only_on_request(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(runs("FedAvg").run_dir), str(tmp_path / "model")]
    assert main(command) == 0
    assert "model.pt2" in capsys.readouterr().err
    about = json.loads((tmp_path / "model/model.json").read_text())
    assert about["run"]["dataset"] == "TinyImages"
    assert about["input"]["size"] == [3, 16, 16]
    assert str(tmp_path) not in json.dumps(about)
    assert "is not empty; give another folder, or --overwrite" in refused(capsys, main, command)
    assert main([*command, "--overwrite"]) == 0


def test_an_onnx_file_gives_the_same_logits(runs: Runs, tmp_path: Path) -> None:
    for needed in ("onnx", "onnxscript"):
        pytest.importorskip(needed)
    runtime = pytest.importorskip("onnxruntime")
    live = runs("PFedPG")
    run = TrainedRun(live.run_dir, device="cpu")
    run.export(tmp_path / "model", "client 2", onnx=True)
    images = live.datamodule.pool.images[:3]
    session = runtime.InferenceSession(tmp_path / "model/model.onnx")
    (found,) = session.run(None, {"images": images.numpy()})
    np.testing.assert_allclose(found, run.client("client 2").logits(images).numpy(), atol=1e-5)
    # The file says by itself what its inputs and outputs are.
    inside = {name: json.loads(value) for name, value in session.get_modelmeta().custom_metadata_map.items()}
    about = json.loads((tmp_path / "model/model.json").read_text())
    assert inside == {name: value for name, value in about.items() if name not in ("files", "how_to_load")}
    assert inside["class_names"] == list(run.client("client 2").class_names)
    mean, std = run.method.simulation.images.pool.transform.statistics
    assert inside["input"]["inside"]["mean_and_std"] == [list(mean), list(std)]
