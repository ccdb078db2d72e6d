"""Loading CLIP through open_clip."""

import logging
from copy import deepcopy
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file

from benchmark.backbones.clip import _only_tag, load_clip
from benchmark.errors import ConfigurationError
from datamodules.digits import DigitDomains


def test_embedded_clip_knows_handwritten_digits_by_name() -> None:
    model, tokenizer = load_clip()
    pool = DigitDomains().load()
    ink = pool.test & (pool.domains == 0)
    with torch.inference_mode():
        text = model.encode_text(tokenizer([f"a photo of a {name}." for name in DigitDomains.class_names]))
        image = model.encode_image((pool.images[ink] / 255 - 0.5) / 0.5)
    scores = torch.nn.functional.normalize(image, dim=1) @ torch.nn.functional.normalize(text, dim=1).T
    assert (scores.argmax(dim=1) == pool.labels[ink]).float().mean() > 0.3  # chance is 0.1


def test_model_is_frozen_and_says_which_pixels_it_takes() -> None:
    model, tokenizer = load_clip()
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.visual.image_mean == model.visual.image_std == (0.5, 0.5, 0.5)
    assert model.visual.image_size == (32, 32)
    tokens = tokenizer(["a photo of a seven."])
    assert tokens.shape == (1, model.context_length) == (1, 32)
    assert tokenizer.vocab_size == model.vocab_size == 49408


def test_random_weights_are_the_same_each_time_and_leave_the_generator_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        first, _ = load_clip(weights="random")
        again, _ = load_clip(weights="random")
    embedded, _ = load_clip()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.text_projection, again.text_projection)
    assert not torch.equal(first.text_projection, embedded.text_projection)
    assert not caplog.records


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_file_gives_the_model_that_was_saved(tmp_path: Path, suffix: str) -> None:
    model, _ = load_clip()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save({"state_dict": model.state_dict()}, path)
    else:
        save_file(model.state_dict(), path)
    loaded, _ = load_clip(weights="file", checkpoint_path=str(path))
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.safetensors: no such file"):
        load_clip(weights="file", checkpoint_path=str(tmp_path / "absent.safetensors"))


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    model, _ = load_clip(weights="random")
    path = tmp_path / "wrong.safetensors"
    save_file({**model.state_dict(), "text_projection": torch.zeros(3, 3)}, path)
    with pytest.raises(ConfigurationError, match=r"wrong\.safetensors: not weights of 'micro_clip'.*text_projection"):
        load_clip(weights="file", checkpoint_path=str(path))


def test_missing_and_unexpected_tensors_are_refused(tmp_path: Path) -> None:
    model, _ = load_clip(weights="random")
    state = dict(model.state_dict())
    path = tmp_path / "other.safetensors"
    save_file({**state, "extra": torch.zeros(1)}, path)
    with pytest.raises(ConfigurationError, match="extra"):
        load_clip(weights="file", checkpoint_path=str(path))
    del state["ln_final.bias"]
    save_file(state, path)
    with pytest.raises(ConfigurationError, match=r"ln_final\.bias"):
        load_clip(weights="file", checkpoint_path=str(path))


class Payload:
    """An object that only an unrestricted unpickler would build."""


@pytest.mark.parametrize("content", ["pickle", "noise", "empty"])
def test_unreadable_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.pt"
    if content == "pickle":
        torch.save({"state_dict": Payload()}, path)
    else:
        path.write_bytes(b"not weights" if content == "noise" else b"")
    with pytest.raises(ConfigurationError, match=r"bad\.pt: cannot be read as weights of 'micro_clip'"):
        load_clip(weights="file", checkpoint_path=str(path))


def test_failed_download_says_what_to_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(entry: dict) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(open_clip, "download_pretrained", refuse)
    with pytest.raises(ConfigurationError) as caught:
        load_clip("RN50", weights="hub")
    message = str(caught.value)
    assert "open_clip_model.safetensors of timm/resnet50_clip.openai" in message
    assert "no route to host" in message
    assert "weights='file'" in message


def test_weights_of_openai_get_their_activation_and_pixels() -> None:
    model, tokenizer = load_clip("RN50", weights="random", pretrained_tag="openai")
    assert isinstance(model.transformer.resblocks[0].mlp.gelu, open_clip.model.QuickGELU)
    assert model.visual.image_mean == open_clip.OPENAI_DATASET_MEAN
    assert tokenizer(["x"]).shape == (1, 77)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "none"}, "weights is hub, file, random or embedded, got 'none'"),
        ({"weights": "file"}, "a path is given with weights='file', and only then"),
        ({"weights": "random", "checkpoint_path": "x.pt"}, "and only then"),
        ({"name": "ViT-B-16"}, "embedded weights exist for micro_clip only, got name='ViT-B-16'"),
        ({"weights": "hub"}, "micro_clip has no weights on a hub"),
        ({"name": "ViT-B/16", "weights": "hub"}, "has no model 'ViT-B/16'; names are such as ViT-B-16"),
        ({"name": "RN50", "weights": "hub", "pretrained_tag": "x"}, "pretrained_tag is one of: openai, yfcc15m, cc12m"),
        (
            {"name": "roberta-ViT-B-32", "weights": "random"},
            "'roberta-ViT-B-32' has a text tower of Hugging Face's (roberta-base), which takes no context here",
        ),
        (
            {"name": "EVA02-B-16", "weights": "hub"},
            "no weights 'openai' of 'EVA02-B-16'; pretrained_tag is one of",
        ),
    ],
)
def test_bad_arguments_are_explained(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_clip(**arguments)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_file_gets_the_activation_that_its_tag_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = open_clip.get_model_config("ViT-B-32")
    for tower in ("vision_cfg", "text_cfg"):
        config[tower] |= {"layers": 2, "width": 64}
    config["text_cfg"]["heads"] = 2
    monkeypatch.setattr(open_clip, "get_model_config", lambda name: deepcopy(config))
    torch.manual_seed(0)
    saved = open_clip.CLIP(**deepcopy(config)).eval()
    path = tmp_path / "weights.pt"
    torch.save(saved.state_dict(), path)
    images, texts = torch.randn(2, 3, 224, 224), open_clip.get_tokenizer("ViT-B-32")(["a cat", "a dog"])

    @torch.no_grad()
    def logits(model: open_clip.CLIP) -> torch.Tensor:
        return 100 * model.encode_image(images, normalize=True) @ model.encode_text(texts, normalize=True).T

    def loaded(tag: str | None) -> torch.Tensor:
        return logits(load_clip("ViT-B-32", "file", tag, str(path))[0])

    torch.testing.assert_close(loaded("laion2b_s34b_b79k"), logits(saved))
    assert (loaded("openai") - logits(saved)).abs().max() > 1e-3
    with pytest.raises(ConfigurationError) as caught:
        loaded(None)
    said = str(caught.value)
    assert said.startswith("a file of weights of 'ViT-B-32' does not tell which activation and pixels")
    assert "give pretrained_tag, that of the weights which it holds or began from: openai, " in said
    assert "(QuickGELU, pixels of mean 0.481, 0.458, 0.408); laion2b_e16, " in said
    assert "(GELU, pixels of" in said


@pytest.mark.parametrize(
    ("name", "quick"),
    [("ViT-B-32-quickgelu", True), ("ViT-H-14-quickgelu", True), ("ViT-g-14", False)],
)
def test_a_name_of_one_kind_of_weights_needs_no_tag(name: str, quick: bool) -> None:
    entry = open_clip.get_pretrained_cfg(name, _only_tag(name))
    assert open_clip.get_model_config(name).get("quick_gelu", False) is quick
    assert entry["mean"] == open_clip.OPENAI_DATASET_MEAN


@pytest.mark.parametrize("name", ["RN50", "ViT-L-14", "ViT-L-14-336", "ViT-S-16"])
def test_any_other_name_needs_one(name: str) -> None:
    with pytest.raises(ConfigurationError, match="give pretrained_tag"):
        load_clip(name, "file", checkpoint_path="weights.pt")
