"""Make the weights of the micro backbones: ``python -m benchmark.backbones.micro.pretrain``.

``micro_vit`` learns to tell rendered glyphs apart; ``micro_clip`` learns to match them with captions. The
draws are keyed by ``SEED``; the arithmetic of another processor or torch version gives slightly other
weights. Both together take about fifteen minutes of one CPU core. The files replace the committed ones.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from benchmark.backbones.clip import load_clip
from benchmark.backbones.micro import TABLE_KEY, micro_clip_path, micro_vit_path, stored_token_rows
from benchmark.backbones.micro.glyphs import CLASSES, DIGITS, LOOKS, GlyphBatch, GlyphRenderer
from benchmark.files import write_bytes
from benchmark.seeds import derived_seed, torch_generator

SEED = 0
BATCH = 128
DIGIT_SHARE = 0.5
PEAK_LR = 1e-3
WARM_UP = 0.15  # share of the steps
WEIGHT_DECAY = 0.05
VIT_STEPS = 3000
CLIP_STEPS = 2500
MAX_LOGIT_SCALE = math.log(100)

# What a caption calls a class. Every class has as many names, so that captions fill a table.
NAMES = tuple(
    (name, f"digit {name}", f"number {name}") if i < len(DIGITS) else (f"letter {name}", name, f"character {name}")
    for i, name in enumerate(CLASSES)
)
LOOK_PHRASES = {
    "dark on light": "dark on light ground",
    "light on dark": "white on dark ground",
    "coloured": "in colour on coloured ground",
    "outlined": "drawn as an outline",
    "noisy": "with much noise",
    "pale": "pale on grey ground",
}
PLAIN_TEMPLATES = (
    "{name}",
    "a {name}.",
    "the {name}.",
    "a photo of a {name}.",
    "a photo of the {name}.",
    "an image of a {name}.",
    "a drawing of a {name}.",
)
LOOK_TEMPLATES = ("a {name}, {look}.", "a photo of a {name}, {look}.", "a picture of a {name} {look}.")


def pretrain_vit(steps: int) -> dict[str, Tensor]:
    """The state of ``micro_vit`` after classifying glyphs for so many steps (its classifier is dropped)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived_seed(SEED, "micro_vit"))
        vit = timm.create_model("micro_vit", num_classes=len(CLASSES))

    def loss(batch: GlyphBatch) -> Tensor:
        return F.cross_entropy(vit(_normalised(batch.images)), batch.classes, label_smoothing=0.1)

    _train(vit, loss, steps, "micro_vit")
    return {key: value for key, value in vit.state_dict().items() if not key.startswith("head.")}


def pretrain_clip(steps: int) -> dict[str, Tensor]:
    """The state of ``micro_clip``, with the rows of the tokens that the captions use, after so many steps."""
    clip, tokenizer = load_clip("micro_clip", weights="random")
    clip.requires_grad_(True)
    captions, mentions = _captions(tokenizer)
    choices = torch_generator(SEED, "micro_clip", "captions")

    def loss(batch: GlyphBatch) -> Tensor:
        size = len(batch.classes)
        name = torch.randint(captions.shape[2], (size,), generator=choices)
        template = torch.randint(captions.shape[3], (size,), generator=choices)
        text = clip.encode_text(captions[batch.classes, batch.looks, name, template], normalize=True)
        image = clip.encode_image(_normalised(batch.images), normalize=True)
        logits = clip.logit_scale.clamp(max=MAX_LOGIT_SCALE).exp() * image @ text.T
        # A batch holds a class many times: a caption fits every image of its class, and of its look if it names one.
        fits = batch.classes[:, None] == batch.classes
        fits &= ~mentions[template] | (batch.looks[:, None] == batch.looks)
        return (_matching_loss(logits, fits) + _matching_loss(logits.T, fits.T)) / 2

    _train(clip, loss, steps, "micro_clip")
    # The first 512 tokens are the single bytes, inside and at the end of a word.
    ids = torch.cat([torch.arange(512), captions.flatten(), torch.tensor(tokenizer.all_special_ids)]).unique()
    return stored_token_rows(clip.state_dict(), ids)


def _captions(tokenizer: Callable[[list[str]], Tensor]) -> tuple[Tensor, Tensor]:
    """All captions, and which templates speak of the look.

    Returns:
        Tokens, [classes, looks, names, templates, context length], and bool, [templates].
    """
    templates = PLAIN_TEMPLATES + LOOK_TEMPLATES
    texts = [
        template.format(name=name, look=LOOK_PHRASES[look])
        for names in NAMES
        for look in LOOKS
        for name in names
        for template in templates
    ]
    tokens = tokenizer(texts).reshape(len(CLASSES), len(LOOKS), len(NAMES[0]), len(templates), -1)
    return tokens, torch.tensor([template in LOOK_TEMPLATES for template in templates])


def _matching_loss(logits: Tensor, fits: Tensor) -> Tensor:
    """Cross-entropy of each row of [B, B] with the uniform distribution over what fits (the diagonal always does)."""
    return F.cross_entropy(logits, fits.float() / fits.sum(dim=1, keepdim=True))


def _normalised(images: Tensor) -> Tensor:
    return (images - 0.5) / 0.5


def _train(model: nn.Module, loss: Callable[[GlyphBatch], Tensor], steps: int, key: str) -> None:
    """AdamW with a warm-up and a cosine decay, on ``steps`` batches."""
    renderer = GlyphRenderer(DIGIT_SHARE)
    generator = torch_generator(SEED, key, "glyphs")
    groups = param_groups_weight_decay(model, WEIGHT_DECAY, no_weight_decay_list=(TABLE_KEY,))
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps, pct_start=WARM_UP)
    model.train()
    for step in range(1, steps + 1):
        value = loss(renderer.batch(BATCH, generator))
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"{key} step {step} of {steps}: loss {value.item():.3f}", flush=True)


def write_weights(state: dict[str, Tensor], path: Path, steps: int) -> None:
    """Write a state as float16 safetensors (integers as they are), atomically, with what made it as metadata."""
    half = {key: value.half() if value.is_floating_point() else value for key, value in state.items()}
    metadata = {
        "format": "pt",
        "made_by": "python -m benchmark.backbones.micro.pretrain",
        "trained_on": "letters and digits rendered with the fonts of matplotlib; no handwriting",
        "license": "Apache-2.0",
        "seed": str(SEED),
        "steps": str(steps),
        "batch": str(BATCH),
        "peak_lr": str(PEAK_LR),
        "weight_decay": str(WEIGHT_DECAY),
        "torch": torch.__version__,
    }
    write_bytes(path, save({key: value.detach().contiguous() for key, value in half.items()}, metadata))


def main() -> None:
    """Pre-train the models named on the command line, or both."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.backbones.micro.pretrain", description=main.__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="micro_vit, micro_clip; default: both")
    models = parser.parse_args().models or ["micro_vit", "micro_clip"]
    if unknown := set(models) - {"micro_vit", "micro_clip"}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are micro_vit and micro_clip")
    if "micro_vit" in models:
        write_weights(pretrain_vit(VIT_STEPS), micro_vit_path(), VIT_STEPS)
    if "micro_clip" in models:
        write_weights(pretrain_clip(CLIP_STEPS), micro_clip_path(), CLIP_STEPS)


if __name__ == "__main__":
    main()
