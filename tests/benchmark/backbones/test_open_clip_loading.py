"""Loading models of open_clip other than CLIP: their tokenizers, files, sizes, and every name that there is."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import open_clip
import pytest
import torch
from small_towers import MARKS, known_models, normal, tiny

from benchmark.backbones.clip import load_clip
from benchmark.backbones.prompted_clip import PromptedCLIP
from benchmark.errors import ConfigurationError
from benchmark.seeds import torch_generator


@pytest.fixture(autouse=True)
def _models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with known_models(tmp_path / "models", monkeypatch):
        yield


def test_a_prompt_that_is_too_long_is_refused() -> None:
    clip = tiny("tiny_siglip")
    with pytest.raises(ConfigurationError, match=r"has 41 tokens \(20 of them context\), the text tower takes 40"):
        clip.class_prompts(["c" * 20], 20)
    clip.class_prompts(["c" * 19], 20)


def test_a_file_is_loaded_and_its_images_resized_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda *_: entry)
    saved = PromptedCLIP("tiny_eva", "random").model
    saved.visual.trunk.pos_embed.normal_(generator=torch_generator("positions"))
    older = {key.removeprefix("text."): value for key, value in saved.state_dict().items()}
    torch.save(saved.state_dict(), tmp_path / "new.pt")
    torch.save(older, tmp_path / "old.pt")
    expected = open_clip.create_model("tiny_eva", pretrained=str(tmp_path / "new.pt"), force_image_size=28).eval()
    x = normal(2, 3, 28, 28)
    for path in (tmp_path / "new.pt", tmp_path / "old.pt"):
        clip = PromptedCLIP("tiny_eva", "file", "any", str(path), image_size=28)
        torch.testing.assert_close(clip.image_features(x), expected.encode_image(x, normalize=True))
        assert torch.equal(clip.model.text.text_projection, saved.text.text_projection)
        assert clip.std == (0.25, 0.25, 0.25)
    with pytest.raises(ConfigurationError, match="the image tower of 'tiny_eva' cannot take images of 5 pixels"):
        PromptedCLIP("tiny_eva", "random", image_size=5)


def test_coca_is_loaded_without_its_decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda *_: entry)
    expected = open_clip.create_model("tiny_coca")
    expected.text_decoder.text_projection.data.zero_()
    torch.save(expected.state_dict(), tmp_path / "coca.pt")
    clip = PromptedCLIP("tiny_coca", "file", "any", str(tmp_path / "coca.pt"))
    kept = clip.model.state_dict()
    assert all(torch.equal(value, expected.state_dict()[key]) for key, value in kept.items())
    assert set(expected.state_dict()) - set(kept) == {
        f"text_decoder.{key}" for key in expected.text_decoder.state_dict()
    }
    first, again = (PromptedCLIP("tiny_coca", "random").state_dict() for _ in range(2))
    assert all(torch.equal(value, again[key]) for key, value in first.items())


def test_a_tokenizer_that_is_not_there_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigurationError) as caught:
        load_clip("ViT-B-16-SigLIP", "random")
    said = str(caught.value)
    assert said.startswith(
        "the tokenizer of 'ViT-B-16-SigLIP' is Hugging Face's timm/ViT-B-16-SigLIP and cannot be loaded"
    )
    assert "pip install transformers" in said
    assert "\n" not in said


@pytest.mark.parametrize("marks", [([], [], 1), ([], [1, 3], 4)])
def test_a_tokenizer_that_pads_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch, marks: tuple[list[int], list[int], int]
) -> None:
    monkeypatch.setitem(MARKS, "tiny_siglip", marks)
    if marks[0] == marks[1]:
        with pytest.raises(ConfigurationError, match="expected are the tokens of a text, a closing token and padding"):
            load_clip("tiny_siglip", "random")
    else:
        assert load_clip("tiny_siglip", "random")[1].tail == [1, 3]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "mean"),
    [("ViT-S-16", 0.4815), ("coca_base", 0.4815), ("ViT-B-16-SigLIP", 0.5), ("MobileCLIP-S1", 0.0), ("RN50", 0.4815)],
)
def test_random_weights_need_no_tag(name: str, mean: float) -> None:
    with torch.device("meta"):
        clip = PromptedCLIP(name, "random")
    assert abs(clip.mean[0] - mean) < 1e-3
    assert not clip.pretrained


def built_or_refused(name: str) -> str:
    """Return what becomes of a name: ``clip``, ``whole``, or the reason why it is refused."""
    try:
        with torch.device("meta"):
            clip = PromptedCLIP(name, "random")
    except ConfigurationError as error:
        return str(error)
    assert clip.class_prompts(["a cat", "a dog"], 4).num_classes == 2
    return "whole" if clip.visual_kind == "whole" else "clip"


def expected_of(name: str) -> str:
    """Return what the pages say of a name."""
    config = open_clip.get_model_config(name)
    if "hf_model_name" in config["text_cfg"]:
        return "'.*' has a text tower of Hugging Face's .*"
    vision = config["vision_cfg"]
    whole = "timm_model_name" in vision or vision.get("output_tokens") or vision.get("pool_type", "tok") != "tok"
    return "whole" if whole else "clip"


@pytest.mark.parametrize("name", ["EVA02-B-16", "MobileCLIP2-S0", "coca_ViT-B-32", "roberta-ViT-B-32", "RN50"])
def test_a_name_is_built_or_refused(name: str) -> None:
    found, expected = built_or_refused(name), expected_of(name)
    assert re.fullmatch(expected, found)


@pytest.mark.slow
def test_every_name_is_built_or_refused() -> None:
    for name in open_clip.list_models():
        found, expected = built_or_refused(name), expected_of(name)
        assert re.fullmatch(expected, found), (name, found)
