"""Letters and digits rendered with the fonts that matplotlib ships, as pre-training images.

Nothing here reads a data set of handwritten digits. A batch is drawn from a keyed generator: font and
character, a smooth distortion of the shape, a loss of sharpness, and a look (paper and ink, coloured
ground, outlines, noise, weak contrast).
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

SIZE = 32
MASTER = 64  # side of the undistorted glyph, in pixels

FONTS = (
    *(f"DejaVuSans{style}.ttf" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}.ttf" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}.ttf" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}.ttf" for style in ("", "Bol", "Italic", "BolIta")),
    *(f"cm{style}10.ttf" for style in ("r", "b", "ss", "ti", "tt")),
)

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Without o and l, which are drawn like 0 and 1.
LETTERS = tuple("abcdefghijkmnpqrstuvwxyz")
CLASSES = DIGITS + LETTERS
# (character, class); upper and lower case are one class, and I is drawn like l.
CHARACTERS = (
    *((str(value), value) for value in range(len(DIGITS))),
    *((letter, len(DIGITS) + i) for i, letter in enumerate(LETTERS)),
    *((letter.upper(), len(DIGITS) + i) for i, letter in enumerate(LETTERS) if letter != "i"),
)

LOOKS = ("dark on light", "light on dark", "coloured", "outlined", "noisy", "pale")


@dataclass(frozen=True)
class GlyphBatch:
    """A batch of pre-training images.

    Attributes:
        images: float32, [B, 3, 32, 32], in [0, 1].
        classes: int64, [B], index into ``CLASSES``.
        looks: int64, [B], index into ``LOOKS``.
    """

    images: Tensor
    classes: Tensor
    looks: Tensor


class GlyphRenderer:
    """Draws batches of glyphs; the undistorted ones are rendered once.

    Args:
        digit_share: share of digits in a batch; the rest are letters.
    """

    def __init__(self, digit_share: float) -> None:
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        # [fonts, characters, 64, 64]
        masters = torch.stack(
            [torch.stack([_master(character, folder / font) for character, _ in CHARACTERS]) for font in FONTS]
        )
        # Two pixels of a master fall on one of an image: smooth, against jagged edges.
        self.masters = F.avg_pool2d(masters, kernel_size=3, stride=1, padding=1)
        self.classes = torch.tensor([label for _, label in CHARACTERS])
        is_digit = self.classes < len(DIGITS)
        self.chances = torch.where(is_digit, digit_share / is_digit.sum(), (1 - digit_share) / (~is_digit).sum())

    def batch(self, size: int, generator: torch.Generator) -> GlyphBatch:
        """Draw a batch; all randomness comes from ``generator``."""
        characters = torch.multinomial(self.chances, size, replacement=True, generator=generator)
        fonts = torch.randint(len(FONTS), (size,), generator=generator)
        looks = torch.randint(len(LOOKS), (size,), generator=generator)
        masters = self.masters[fonts, characters][:, None]
        strokes = _soften(_distort(masters, generator), generator)
        return GlyphBatch(_paint(strokes, looks, generator), self.classes[characters], looks)


def _master(character: str, font: Path) -> Tensor:
    """One glyph, its ink filling the height of [64, 64], values in [0, 1]."""
    drawn = Image.new("L", (4 * MASTER, 4 * MASTER))
    ImageDraw.Draw(drawn).text((MASTER, MASTER), character, fill=255, font=ImageFont.truetype(str(font), 2 * MASTER))
    box = drawn.getbbox()
    if box is None:
        raise ValueError(f"{font.name} has no glyph for {character!r}")
    glyph = drawn.crop(box)
    scale = min(MASTER / glyph.height, MASTER / glyph.width)
    glyph = glyph.resize((max(1, round(glyph.width * scale)), max(1, round(glyph.height * scale))))
    square = Image.new("L", (MASTER, MASTER))
    square.paste(glyph, ((MASTER - glyph.width) // 2, (MASTER - glyph.height) // 2))
    return pil_to_tensor(square)[0].float() / 255


def _uniform(size: int, low: float, high: float, generator: torch.Generator) -> Tensor:
    return torch.rand(size, generator=generator) * (high - low) + low


def _distort(masters: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, slant, scale, shift and bend: [B, 1, 64, 64] to [B, 1, 32, 32]."""
    size = len(masters)
    angle = _uniform(size, -0.25, 0.25, generator)
    slant = _uniform(size, -0.3, 0.3, generator)
    # The scales map the output to the glyph: above one, the glyph is smaller than the image.
    wide, high = _uniform(size, 0.95, 1.6, generator), _uniform(size, 0.9, 1.2, generator)
    cos, sin = angle.cos(), angle.sin()
    shift = _uniform(2 * size, -0.1, 0.1, generator).reshape(size, 2, 1)
    turn = torch.stack([wide * cos, wide * (slant - sin), high * sin, high * cos], dim=1).reshape(size, 2, 2)
    grid = F.affine_grid(torch.cat([turn, shift], dim=2), [size, 1, SIZE, SIZE], align_corners=False)
    bend = torch.randn(size, 2, 4, 4, generator=generator) * _uniform(size, 0, 0.1, generator).reshape(-1, 1, 1, 1)
    bend = F.interpolate(bend, size=(SIZE, SIZE), mode="bicubic", align_corners=True)
    return F.grid_sample(masters, grid + bend.permute(0, 2, 3, 1), align_corners=False)


def _soften(strokes: Tensor, generator: torch.Generator) -> Tensor:
    """Vary the thickness, and show a part of the batch at a low resolution: [B, 1, 32, 32] to the same."""
    size = len(strokes)
    thick = F.max_pool2d(strokes, kernel_size=3, stride=1, padding=1)
    weight = _uniform(size, 0, 1, generator).reshape(-1, 1, 1, 1)
    strokes = torch.lerp(strokes, thick, weight)
    sides = torch.tensor([7, 8, 10, 12, 16, SIZE])[torch.randint(6, (size,), generator=generator)]
    softened = torch.empty_like(strokes)
    for side in sides.unique().tolist():
        chosen = sides == side
        small = F.interpolate(strokes[chosen], size=(side, side), mode="area")
        small = (small * 1.3).clamp(0, 1)  # averaging thins the ink
        softened[chosen] = F.interpolate(small, size=(SIZE, SIZE), mode="bicubic", align_corners=False).clamp(0, 1)
    return softened


def _paint(strokes: Tensor, looks: Tensor, generator: torch.Generator) -> Tensor:
    """Colour the strokes [B, 1, 32, 32] by ``looks`` [B]: [B, 3, 32, 32] in [0, 1]."""
    size = len(strokes)
    look = {name: (looks == i).reshape(-1, 1, 1, 1) for i, name in enumerate(LOOKS)}

    band = _uniform(size, 0.14, 0.26, generator).reshape(-1, 1, 1, 1)
    edge = torch.exp(-(((strokes - 0.5) / band) ** 2))
    weight = torch.where(look["outlined"], edge, strokes)

    light = _uniform(size, 0.8, 1.0, generator).reshape(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    dark = _uniform(size, 0.0, 0.2, generator).reshape(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    swap = torch.rand(size, 1, 1, 1, generator=generator) < 0.5
    inverted = look["light on dark"] | (look["outlined"] & swap)
    ground, ink = torch.where(inverted, dark, light), torch.where(inverted, light, dark)

    # Two colours that differ by half of the range or more in at least one channel.
    colour = torch.rand(size, 3, 1, 1, generator=generator)
    other = (colour + 0.5 + 0.4 * (torch.rand(size, 3, 1, 1, generator=generator) - 0.5)) % 1.0
    ground, ink = torch.where(look["coloured"], colour, ground), torch.where(look["coloured"], other, ink)

    middle = _uniform(size, 0.3, 0.7, generator).reshape(-1, 1, 1, 1)
    step = _uniform(size, 0.06, 0.2, generator).reshape(-1, 1, 1, 1) * torch.where(swap, 1.0, -1.0)
    ground = torch.where(look["pale"], middle, ground)
    ink = torch.where(look["pale"], middle + step, ink)

    noise = torch.randn(size, 3, SIZE, SIZE, generator=generator)
    level = torch.where(look["noisy"], _uniform(size, 0.1, 0.3, generator).reshape(-1, 1, 1, 1), 0.01)
    return torch.lerp(ground, ink, weight).add(noise * level).clamp(0, 1)
