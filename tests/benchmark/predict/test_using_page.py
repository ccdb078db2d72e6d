"""The page of ``docs/`` on trained models: all that it tells people to do, done in order."""

import csv
import importlib.util
import re
import runpy
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import datamodules
from benchmark.checks.command import FewDigits
from benchmark.commands import main
from benchmark.run.cli import FederatedCLI
from datamodules.pixels import Decoding, Fit, decode

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/using_a_model.md").read_text()
#: The page's programs by name.
PROGRAMS = dict(re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)```", PAGE, re.DOTALL))


def test_the_page_on_trained_models_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datamodules, "DigitDomains", FewDigits)
    monkeypatch.setattr("datamodules.digits.DigitDomains", FewDigits)
    monkeypatch.chdir(tmp_path)
    first = next(line for line in re.findall(r"`(lightning-cli fit [^`]*)`", PAGE))
    short = ["--trainer.max_epochs=1", "--model.init_args.training.steps=2", "--trainer.num_sanity_val_steps=0"]
    arguments = shlex.split(first.replace("configs/", f"{ROOT}/configs/"))[1:]
    data = FederatedCLI([*arguments, *short, "--trainer.enable_progress_bar=false"]).datamodule
    for folder, held in (("images", data.held_out["test"]), ("ward", data.train_indices)):
        for number, row in enumerate(held[0].tolist()[:12]):
            name = data.class_names[data.pool.labels[row]] if folder == "ward" else "."
            at = tmp_path / folder / name / f"{number}.png"
            at.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(data.pool.images[row].permute(1, 2, 0).numpy()).save(at)
    Path("images.csv").write_text("path\nimages/1.png\nimages/0.png\n")
    monkeypatch.setattr(FewDigits, "load", None)  # the training data are gone
    shown = {}
    for line in "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "benchmark"
        capsys.readouterr()
        assert main(words) == 0, line
        shown[shlex.join(words)] = capsys.readouterr()
    answers = list(csv.reader(shown["predict runs/one images --client ink"].out.splitlines()))
    assert answers[0] == ["path", "class", "probability"]
    assert [path for path, *_ in answers[1:]] == sorted(f"images/{number}.png" for number in range(12))
    every = list(csv.DictReader(Path("predictions.csv").read_text().splitlines()))
    assert [row["path"] for row in every] == ["images/1.png", "images/0.png"]
    assert len(every[0]) == 3 + 10
    by_path = {path: answer for path, answer, _ in answers[1:]}
    assert [row["class"] for row in every] == [by_path[row["path"]] for row in every]
    for name, text in PROGRAMS.items():
        Path(name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)  # as the programs' folder is where they are started
    capsys.readouterr()
    runpy.run_path("use_export.py")
    assert capsys.readouterr().out.split() == [by_path["images/0.png"]]
    if all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime"))):
        assert main(["export", "runs/one", "model", "--client=ink", "--onnx", "--overwrite"]) == 0
        capsys.readouterr()
        runpy.run_path("use_onnx.py")
        assert capsys.readouterr().out.splitlines()[-1] == by_path["images/0.png"]
    importlib.import_module("use_model")
    assert all(name in capsys.readouterr().out for name in ("ink",))


@pytest.mark.parametrize("fit", ["squash", "crop"])
@pytest.mark.parametrize("as_seen", [True, False])
def test_the_pages_decoding_is_the_runs(fit: Fit, as_seen: bool, tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (9, 14, 4), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    for name, mode, more in (("a.jpg", "RGB", {"exif": turned}), ("b.png", "RGBA", {}), ("c.gif", "P", {})):
        Image.fromarray(picture).convert(mode).save(tmp_path / name, **more)
        how = Decoding(6, fit, as_seen)
        found = namespace()["decoded"](tmp_path / name, asdict(how))
        assert np.array_equal(np.asarray(found).transpose(2, 0, 1), decode(tmp_path / name, how).pixels)
    Image.fromarray(np.zeros((4, 4), dtype=np.uint16)).save(tmp_path / "d.png")
    with pytest.raises(ValueError, match=r"d\.png has 16 bits"):
        namespace()["decoded"](tmp_path / "d.png", asdict(Decoding(6, fit, as_seen)))


def namespace() -> dict[str, Any]:
    """Return what the page's ``decode_file.py`` defines."""
    made: dict[str, Any] = {}
    exec(PROGRAMS["decode_file.py"], made)
    return made
