"""The micro backbones: their committed weights, the glyphs they learned from, and the script that made them."""

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
from processes import Forked
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from benchmark.backbones.micro import (
    expand_token_rows,
    micro_clip_config_path,
    micro_clip_path,
    micro_vit_path,
    pretrain,
    stored_token_rows,
)
from benchmark.backbones.micro.glyphs import CLASSES, DIGITS, FONTS, LOOKS, GlyphRenderer
from benchmark.seeds import torch_generator
from datamodules.digits import DigitDomains
from datamodules.source import ImagePool

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pool() -> ImagePool:
    return DigitDomains().load()


@pytest.fixture(scope="module")
def renderer() -> GlyphRenderer:
    return GlyphRenderer(digit_share=0.5)


def micro_vit(**arguments: Any) -> VisionTransformer:
    return cast(VisionTransformer, timm.create_model("micro_vit", **arguments))


def probe_accuracy(vit: nn.Module, pool: ImagePool, domain: int) -> float:
    """Accuracy of a logistic regression on frozen features, trained and tested in one domain."""
    here = pool.domains == domain
    with torch.inference_mode():
        features = vit.eval()((pool.images[here] / 255 - 0.5) / 0.5).numpy()
    labels, test = pool.labels[here].numpy(), pool.test[here].numpy()
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
    return probe.fit(features[~test], labels[~test]).score(features[test], labels[test])


def test_committed_vit_separates_digits_it_has_never_seen(pool: ImagePool) -> None:
    vit = micro_vit(checkpoint_path=str(micro_vit_path()))
    accuracies = [probe_accuracy(vit, pool, domain) for domain in range(6)]
    assert accuracies[0] > 0.85
    assert min(accuracies) > 0.7
    assert np.mean(accuracies) > 0.85


def test_random_vit_is_clearly_worse(pool: ImagePool) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        vit = micro_vit()
    assert probe_accuracy(vit, pool, 0) < 0.75


def test_both_weight_files_are_small_half_precision_and_say_what_made_them() -> None:
    paths = micro_vit_path(), micro_clip_path()
    assert sum(path.stat().st_size for path in paths) < 4_000_000
    for path in paths:
        kinds = {value.dtype for key, value in load_file(path).items() if key != "token_embedding.ids"}
        assert kinds == {torch.float16}
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        assert metadata["made_by"] == "python -m benchmark.backbones.micro.pretrain"
        assert "no handwriting" in metadata["trained_on"]
        assert metadata["seed"] == "0"


def test_timm_builds_the_vit_as_any_other() -> None:
    vit = micro_vit(num_classes=7, drop_path_rate=0.1)
    assert vit(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    pixels = timm.data.resolve_model_data_config(vit)
    assert pixels["mean"] == pixels["std"] == (0.5, 0.5, 0.5)
    features = micro_vit()
    assert features(torch.zeros(2, 3, 32, 32)).shape == (2, 96)
    assert 400_000 < sum(parameter.numel() for parameter in features.parameters()) < 600_000
    larger = micro_vit(img_size=64)
    assert larger.patch_embed.num_patches == 64


def test_micro_package_does_not_import_open_clip() -> None:
    code = "import sys, benchmark.backbones.micro; print('open_clip' in sys.modules)"  # nor does what a run imports
    process = Forked([sys.executable, "-c", code], ROOT, os.environ)
    assert process.communicate()[0].strip() == "False"


def test_token_rows_expand_to_the_whole_table() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    state = {
        "token_embedding.rows": rows.half(),
        "token_embedding.ids": torch.tensor([5, 49407], dtype=torch.int32),
        "ln_final.weight": torch.ones(2),
    }
    full = expand_token_rows(state)
    table = full["token_embedding.weight"]
    assert set(full) == {"token_embedding.weight", "ln_final.weight"}
    assert table.shape == (49408, 2)
    assert table.dtype == torch.float32
    assert table[5].tolist() == [1, 2]
    assert table[49407].tolist() == [3, 6]
    assert table[0].tolist() == table[49406].tolist() == [2, 4]


def test_storing_rows_and_expanding_them_keeps_the_stored_rows() -> None:
    table = torch.randn(49408, 3, generator=torch_generator("table"))
    ids = torch.tensor([0, 7, 300])
    full = expand_token_rows(stored_token_rows({"token_embedding.weight": table}, ids))
    assert torch.equal(full["token_embedding.weight"][ids], table[ids])


def test_a_whole_state_is_not_changed() -> None:
    state = {"token_embedding.weight": torch.ones(4, 2)}
    assert expand_token_rows(state) is state


def test_stored_tokens_are_single_bytes_special_tokens_and_those_of_captions() -> None:
    from open_clip import SimpleTokenizer

    tokenizer = SimpleTokenizer()
    ids = set(load_file(micro_clip_path())["token_embedding.ids"].tolist())
    assert ids >= set(range(512)) | {tokenizer.sot_token_id, tokenizer.eot_token_id}
    assert ids >= {token for name in DIGITS for token in tokenizer.encode(f"a photo of a {name}.")}
    assert len(ids) < 700


def test_config_of_the_clip_uses_the_vocabulary_of_open_clip() -> None:
    config = json.loads(micro_clip_config_path().read_text())
    assert config["text_cfg"]["vocab_size"] == 49408


def test_glyphs_are_keyed_and_in_range(renderer: GlyphRenderer) -> None:
    first, again, other = (renderer.batch(64, torch_generator("glyphs", key)) for key in (0, 0, 1))
    assert first.images.shape == (64, 3, 32, 32)
    assert first.images.min() >= 0
    assert first.images.max() <= 1
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.classes, again.classes)
    assert not torch.equal(first.images, other.images)


def test_every_font_has_every_character(renderer: GlyphRenderer) -> None:
    ink = renderer.masters.mean(dim=(2, 3))
    assert ink.shape[0] == len(FONTS)
    assert ink.min() > 0.03
    # A font without a glyph draws the same box for all.
    for masters in renderer.masters:
        assert len(masters.flatten(1).unique(dim=0)) == len(masters)


def test_digits_are_half_of_a_batch_and_all_looks_occur(renderer: GlyphRenderer) -> None:
    batch = renderer.batch(2000, torch_generator("shares"))
    assert (batch.classes < len(DIGITS)).float().mean() == pytest.approx(0.5, abs=0.05)
    assert len(batch.classes.unique()) == len(CLASSES)
    assert torch.bincount(batch.looks).min() > 2000 / len(LOOKS) * 0.7
    contrast = batch.images.std(dim=(1, 2, 3))
    pale, plain = (contrast[batch.looks == LOOKS.index(look)].median() for look in ("pale", "dark on light"))
    assert pale < plain / 3


def test_matching_loss_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 3.0, 1.0]])
    fits = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])
    log_p = torch.log_softmax(logits, dim=1)
    expected = -(log_p[0, 0] + (log_p[1, 0] + log_p[1, 1]) / 2 + log_p[2, 2]) / 3
    assert pretrain._matching_loss(logits, fits) == pytest.approx(expected.item())


def test_pretraining_lowers_the_loss_and_repeats_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pretrain, "BATCH", 8)
    before = torch.get_rng_state()
    first, again = pretrain.pretrain_vit(steps=2), pretrain.pretrain_vit(steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.keys() == load_file(micro_vit_path()).keys()
    assert all(torch.equal(first[key], again[key]) for key in first)

    path = tmp_path / "weights.safetensors"
    pretrain.write_weights(first, path, steps=2)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    vit = micro_vit(checkpoint_path=str(path))
    assert torch.equal(vit.state_dict()["cls_token"], first["cls_token"].half().float())


def test_clip_pretraining_stores_what_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrain, "BATCH", 8)
    state: dict[str, Tensor] = pretrain.pretrain_clip(steps=1)
    committed = load_file(micro_clip_path())
    assert {key: value.shape for key, value in state.items()} == {key: v.shape for key, v in committed.items()}
    assert torch.equal(state["token_embedding.ids"], committed["token_embedding.ids"])
