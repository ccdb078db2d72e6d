"""CLIPs with a BERT, as BiomedCLIP, against torch's own layers and open_clip's towers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import build, fit, learned
from open_clip.timm_model import TimmModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmark.backbones.bert_clip import BertCLIP
from benchmark.errors import ConfigurationError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", ".", "a", "photo", "of", "nevus", "melanoma", "##s", "class"]
PIECES += [f"##{digit}" for digit in range(8)]
WIDTH, LAYERS, HIDDEN, SIZE, IMAGE = 128, 2, 96, 24, 160
CONFIG: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": SIZE,
        "vision_cfg": {
            "timm_model_name": "test_vit",
            "timm_model_pretrained": False,
            "timm_pool": "",
            "timm_proj": "linear",
            "image_size": IMAGE,
        },
        "text_cfg": {
            "hf_model_name": "somewhere/bert",
            "hf_tokenizer_name": "somewhere/bert",
            "hf_proj_type": "mlp",
            "hf_pooler_type": "cls_last_hidden_state_pooler",
            "context_length": 12,
        },
    },
    "preprocess_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.1, 0.2, 0.3]},
}


def weights() -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=drawn)

    tables = {"word": len(PIECES), "position": 16, "token_type": 2}
    text = {f"embeddings.{name}_embeddings.weight": random(n, WIDTH) for name, n in tables.items()}
    linear = dict.fromkeys([f"attention.self.{name}" for name in ("query", "key", "value")], (WIDTH, WIDTH))
    linear |= {"attention.output.dense": (WIDTH, WIDTH), "intermediate.dense": (HIDDEN, WIDTH)}
    linear |= {"output.dense": (WIDTH, HIDDEN)}
    norms = [
        "embeddings.",
        *(f"encoder.layer.{n}.{of}." for n in range(LAYERS) for of in ("attention.output", "output")),
    ]
    for name in norms:
        text |= {f"{name}LayerNorm.weight": 1 + random(WIDTH), f"{name}LayerNorm.bias": random(WIDTH)}
    for n in range(LAYERS):
        for name, shape in linear.items():
            text[f"encoder.layer.{n}.{name}.weight"] = random(*shape)
            text[f"encoder.layer.{n}.{name}.bias"] = random(shape[0])
    made = {f"text.transformer.{name}": value for name, value in text.items()}
    middle = (WIDTH + SIZE) // 2
    made |= {"text.proj.0.weight": random(middle, WIDTH), "text.proj.2.weight": random(SIZE, middle)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        visual = TimmModel("test_vit", SIZE, image_size=IMAGE, pool="")
    return (
        made
        | {f"visual.{name}": value for name, value in visual.state_dict().items()}
        | {
            "logit_scale": torch.tensor(85.2).log(),
            "text.transformer.embeddings.position_ids": torch.arange(16)[None],
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bert_clip")
    save_file(weights(), made / "open_clip_model.safetensors")
    (made / "open_clip_config.json").write_text(json.dumps(CONFIG))
    (made / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return made


def widened(value: Tensor, by: int) -> Tensor:
    """A tensor of the text tower for one of more width, as MiniLM's of 384, whose heads are of 32."""
    for dimension in [at for at, size in enumerate(value.shape) if size == WIDTH]:
        value = value.repeat_interleave(by, dimension)
    return value.contiguous()


def of_torch(w: dict[str, Tensor], rows: Tensor, pooling: str = "start") -> Tensor:
    """The feature of one text by torch's own encoder layers, of its tokens' embeddings [T, w]."""
    w = {name.removeprefix("text.transformer."): value for name, value in w.items()}
    kind = w["embeddings.token_type_embeddings.weight"][0]
    x = rows + w["embeddings.position_embeddings.weight"][: len(rows)] + kind
    x = F.layer_norm(x, (WIDTH,), w["embeddings.LayerNorm.weight"], w["embeddings.LayerNorm.bias"], 1e-12)[None]
    for n in range(LAYERS):
        layer = nn.TransformerEncoderLayer(WIDTH, WIDTH // 64, HIDDEN, 0.0, F.gelu, 1e-12, batch_first=True).double()
        of = f"encoder.layer.{n}."
        parts = [f"{of}attention.self.{name}" for name in ("query", "key", "value")]
        layer.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat([w[f"{part}.weight"] for part in parts]),
                "self_attn.in_proj_bias": torch.cat([w[f"{part}.bias"] for part in parts]),
                **{f"self_attn.out_proj.{k}": w[f"{of}attention.output.dense.{k}"] for k in ("weight", "bias")},
                **{f"linear1.{k}": w[f"{of}intermediate.dense.{k}"] for k in ("weight", "bias")},
                **{f"linear2.{k}": w[f"{of}output.dense.{k}"] for k in ("weight", "bias")},
                **{f"norm1.{k}": w[f"{of}attention.output.LayerNorm.{k}"] for k in ("weight", "bias")},
                **{f"norm2.{k}": w[f"{of}output.LayerNorm.{k}"] for k in ("weight", "bias")},
            }
        )
        x = layer.double()(x.double())
    read = x[0, 0] if pooling == "start" else x[0].mean(0)
    hidden = F.gelu(read @ w["text.proj.0.weight"].double().T)
    return F.normalize(hidden @ w["text.proj.2.weight"].double().T, dim=-1)


def test_texts_and_contexts_have_the_features_of_torchs_own_layers(folder: Path) -> None:
    towers, w = BertCLIP(str(folder)), load_file(folder / "open_clip_model.safetensors")
    words = w["text.transformer.embeddings.word_embeddings.weight"]
    ids = [[8], [9, 10]]  # nevus, melanomas: padded to one length
    plain = towers.text_features_of(["nevus", "melanomas"])
    for row, own in zip(plain, ids, strict=True):
        expected = of_torch(w, words[torch.tensor([2, *own, 3])])
        torch.testing.assert_close(row.double(), expected, atol=1e-5, rtol=1e-4)
    context = 0.3 * torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    learned_ones = towers.text_features(towers.class_prompts(["nevus", "melanomas"], 3, "{}"), context)
    for row, own in zip(learned_ones, ids, strict=True):
        tokens = torch.cat([words[2:3], context, words[torch.tensor([*own, 3])]])
        torch.testing.assert_close(row.double(), of_torch(w, tokens), atol=1e-5, rtol=1e-4)
    assert towers.text_features(towers.prompts_of(["nevus"], 3), context.expand(4, 3, -1)).shape == (4, 1, SIZE)


def test_the_mean_of_tokens_and_a_linear_projection(folder: Path, tmp_path: Path) -> None:
    w = load_file(folder / "open_clip_model.safetensors")
    config = json.loads(json.dumps(CONFIG))
    config["model_cfg"]["text_cfg"] |= {"hf_pooler_type": "mean_pooler"}
    change(folder, tmp_path, config=config)
    words = w["text.transformer.embeddings.word_embeddings.weight"]
    expected = of_torch(w, words[torch.tensor([2, 5, 8, 3])], "mean")
    (found,) = BertCLIP(str(tmp_path)).text_features_of(["a nevus"])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    config["model_cfg"]["text_cfg"] |= {"hf_proj_type": "linear", "hf_pooler_type": "cls_last_hidden_state_pooler"}
    only = {name: value for name, value in w.items() if not name.startswith("text.proj.")}
    projection = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(1))
    change(folder, tmp_path, config=config, state=only | {"text.proj.weight": projection})
    towers = BertCLIP(str(tmp_path))
    tokens = towers.text_tokens(towers.prompts_of(["a nevus"], 0), None)
    torch.testing.assert_close(towers.text_features_of(["a nevus"]), F.normalize(tokens[:, 0] @ projection.T, dim=-1))


def test_images_have_the_features_of_open_clips_image_tower(folder: Path) -> None:
    towers = BertCLIP(str(folder))
    own = TimmModel("test_vit", SIZE, image_size=IMAGE, pool="").eval()
    w = load_file(folder / "open_clip_model.safetensors")
    own.load_state_dict(
        {name.removeprefix("visual."): value for name, value in w.items() if name.startswith("visual.")}
    )
    x = torch.randn(2, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(towers.train().image_features(x), F.normalize(own(x), dim=-1))
    assert (towers.mean, towers.std) == ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    assert towers.logit_scale.item() == pytest.approx(85.2)
    assert not any(value.requires_grad for value in towers.parameters())
    small = BertCLIP(str(folder), image_size=64)
    assert small.image_features(x[:, :, :64, :64]).shape == (2, SIZE)
    with pytest.raises(ConfigurationError, match=r"expected \[B, 3, 64, 64\]: set the data's image size"):
        small.image_features(x)


def test_a_text_tower_of_transformers_has_the_same_features(folder: Path) -> None:
    # open_clip's own adapter of Hugging Face's BERT, where that package is installed
    transformers = pytest.importorskip("transformers")
    from open_clip.hf_model import HFTextEncoder

    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": WIDTH // 64}
    config = transformers.BertConfig(
        vocab_size=len(PIECES), intermediate_size=HIDDEN, max_position_embeddings=16, pad_token_id=0, **sizes
    )
    own = HFTextEncoder(
        "bert", SIZE, config=config, pooler_type="cls_last_hidden_state_pooler", proj_type="mlp", pretrained=False
    ).eval()
    w = load_file(folder / "open_clip_model.safetensors")
    state = {name.removeprefix("text."): value for name, value in w.items() if name.startswith("text.")}
    lost = own.load_state_dict(state, strict=False)
    assert all("pooler" in name or "position_ids" in name for name in (*lost.missing_keys, *lost.unexpected_keys))
    ids = torch.tensor([[2, 5, 8, 3, 0, 0], [2, 5, 6, 7, 9, 3]])
    expected = F.normalize(own(ids), dim=-1)
    found = BertCLIP(str(folder)).text_features_of(["a nevus", "a photo of melanoma"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["PromptFL", "FedPGP"])
def test_text_prompts_are_learned_on_it(folder: Path, name: str) -> None:
    options = ["--model.clip=benchmark.backbones.bert_clip.BertCLIP", f"--model.clip.folder={folder}"]
    options += ["--model.clip.image_size=32", "--model.num_context=3"]
    found = []
    for width in (1, 3):
        method, data = build(name, *options, f"--data.clients_at_once={width}")
        before = {n: value.clone() for n, value in method.named_parameters() if n.startswith(method.shared)}
        fit(method, data, 1)
        assert before
        assert all(not torch.equal(value, method.get_parameter(n)) for n, value in before.items())
        found.append(learned(method))
    for each, value in found[0].items():
        torch.testing.assert_close(value, found[1][each], atol=1e-5, rtol=1e-4, equal_nan=True)


def change(folder: Path, other: Path, *, config: Any = None, state: Any = None, pieces: Any = None) -> None:
    """Write the files of a folder into another, some of them changed."""
    (other / "open_clip_config.json").write_text(json.dumps(CONFIG if config is None else config))
    (other / "vocab.txt").write_text("\n".join(PIECES if pieces is None else pieces) + "\n")
    save_file(
        load_file(folder / "open_clip_model.safetensors") if state is None else state,
        other / "open_clip_model.safetensors",
    )


def test_what_does_not_fit_is_refused_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(match: str, **changes: Any) -> None:
        change(folder, tmp_path, **changes)
        with pytest.raises(ConfigurationError, match=match) as error:
            BertCLIP(str(tmp_path))
        assert "\n" not in str(error.value)

    with pytest.raises(ConfigurationError, match="give one of the two"):
        BertCLIP()
    with pytest.raises(ConfigurationError, match=r"is not the configuration of a CLIP"):
        BertCLIP(str(tmp_path))
    w = load_file(folder / "open_clip_model.safetensors")
    config = json.loads(json.dumps(CONFIG))
    config["model_cfg"]["text_cfg"]["hf_pooler_type"] = "max_pooler"
    refused("pooled by 'max_pooler'", config=config)
    refused(r"has 2 pieces, and the weights embed 20|lacks", pieces=["[UNK]", "[CLS]"])
    refused(r"has 21 pieces, and the weights embed 20", pieces=[*PIECES, "more"])
    refused("do not fit the text tower's projection", state={n: v for n, v in w.items() if n != "text.proj.2.weight"})
    refused(
        "do not fit the image tower 'test_vit'", state={n: v for n, v in w.items() if n != "visual.head.proj.weight"}
    )
    refused("no BERT's", state={n: v for n, v in w.items() if "word_embeddings" not in n})
    wide = {n: widened(v, 3) if n.startswith("text.transformer.") else v for n, v in w.items()}
    refused(r"width of 384, and its files do not say how many attention heads; expected .* 768, 1024", state=wide)
    refused("it has no logit_scale", state={n: v for n, v in w.items() if n != "logit_scale"})
    refused("NaN or infinite", state=w | {"logit_scale": torch.tensor(torch.nan)})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable is read by the import alone
    with pytest.raises(ConfigurationError, match=r"repository 'nobody/nothing' could not be loaded.*give their folder"):
        BertCLIP(repository="nobody/nothing")
    towers = BertCLIP(str(folder))
    with pytest.raises(ConfigurationError, match="has no parts in its text tower"):
        towers.text_features(towers.prompts_of(["nevus"], 0), length=torch.tensor(0))
    with pytest.raises(ConfigurationError, match=r"has 13 tokens \(3 of them context\), the text tower takes 12"):
        towers.class_prompts(["nevus nevus nevus nevus nevus nevus nevus nevus"], 3, "{}")
