"""Files of weights that hold something else."""

from pathlib import Path

import numpy as np
import pytest
import torch
from federation import CONF
from refusal import refused
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmark.backbones.micro import micro_clip_path, micro_vit_path
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.backbones.vit import TimmViT
from benchmark.errors import ConfigurationError
from benchmark.run.cli import main

DTYPES = {"int8": "int8", "complex64": "complex64", "int64": "int64", "bool": "bool"}
BAD = [*DTYPES, "nan", "inf"]


def spoiled(value: Tensor, how: str) -> Tensor:
    """A tensor of another type, or with one number that is none."""
    if how in DTYPES:
        return value.to(getattr(torch, how))
    value = value.clone()
    value.view(-1)[3] = float(how)
    return value


def said(how: str, name: str) -> str:
    """Return a pattern that the refusal of a spoiled tensor contains."""
    return f"{name} is of type {how}, not of real" if how in DTYPES else rf"{name} has 1 of \d+ numbers that are NaN"


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("file", ["safetensors", "pt"])
def test_weights_of_a_vit(how: str, file: str, tmp_path: Path) -> None:
    state = load_file(micro_vit_path())
    state["blocks.2.mlp.fc1.weight"] = spoiled(state["blocks.2.mlp.fc1.weight"], how)
    path = tmp_path / f"bad.{file}"
    if file == "pt":
        torch.save(state, path)
    else:
        save_file(state, path)
    with pytest.raises(ConfigurationError, match=rf"bad\.{file}: not weights .*{said(how, 'blocks.2.mlp.fc1.weight')}"):
        TimmViT("micro_vit", "file", str(path))


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("image_size", [None, 64])
@pytest.mark.parametrize("name", ["visual.proj", "token_embedding.rows"])
def test_weights_of_a_clip(how: str, image_size: int | None, name: str, tmp_path: Path) -> None:
    state = load_file(micro_clip_path())
    state[name] = spoiled(state[name], how)
    torch.save(state, tmp_path / "bad.pt")
    with pytest.raises(ConfigurationError, match=rf"bad\.pt: not weights of 'micro_clip': {said(how, name)}"):
        PromptedCLIP("micro_clip", "file", checkpoint_path=str(tmp_path / "bad.pt"), image_size=image_size)


def test_weights_of_googles_form(tmp_path: Path) -> None:
    kernel = np.zeros((16, 16, 3, 64))
    kernel[0, 0, 0, 0] = np.nan
    np.savez(tmp_path / "bad.npz", **{"embedding/kernel": kernel})
    with pytest.raises(ConfigurationError, match="embedding/kernel has 1 of 49152 numbers that are NaN"):
        TimmViT("test_vit", "file", str(tmp_path / "bad.npz"), image_size=32)


@pytest.mark.parametrize("conf", ["HeadTune", "ZeroShotCLIP"])
def test_a_run_says_so_in_one_line(
    conf: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path, part, name, tensor = {
        "HeadTune": (micro_vit_path(), "backbone", "micro_vit", "norm.weight"),
        "ZeroShotCLIP": (micro_clip_path(), "clip", "micro_clip", "visual.proj"),
    }[conf]
    state = load_file(path)
    state[tensor] = spoiled(state[tensor], "nan")
    save_file(state, "bad.safetensors")
    given = {"name": name, "weights": "file", "checkpoint_path": "bad.safetensors"}
    arguments = ["fit", "--config", str(CONF / "base.yaml"), "--config", str(CONF / f"{conf}.yaml"), "--run_dir=run"]
    arguments += [f"--model.init_args.{part}.init_args.{key}={value}" for key, value in given.items()]
    assert f"bad.safetensors: not weights of {name!r}: {tensor} has 1 of" in refused(capsys, main, arguments)
