"""Printed letters in the styles of the digits: a second data set that every machine has.

The letters are drawn with the fonts that matplotlib ships, reduced to the 8x8 pixels and 17 grey levels of
scikit-learn's digits, and rendered like these (:mod:`datamodules.digits`). As a stream of foreign images beside the
digits they differ in what they show, and not in how they look. Numbers from it are a demonstration, not a published
benchmark.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from datamodules.digits import STYLES, rendered
from datamodules.source import ImagePool, ImageSource

FONTS = tuple(
    f"DejaVu{family}{style}.ttf"
    for family, styles in (
        ("Sans", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("SansMono", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("Serif", ("", "-Bold", "-Italic", "-BoldItalic")),
    )
    for style in styles
)
#: Whose letters are for testing.
TEST_FONTS = tuple(f"STIXGeneral{style}.ttf" for style in ("", "Bol", "Italic", "BolIta"))
#: Pixels of a digit of scikit-learn's, and how many a letter is drawn with for each of them.
SIDE, FINER = 8, 16


class Letters(ImageSource):
    """The letters of the alphabet, but for i, l and o, which look like digits, in both cases and six domains.

    Each letter of each font is rendered in one style. Letters of four fonts are for testing.
    """

    title = "Printed letters"
    embedded = True
    class_names = tuple("abcdefghjkmnpqrstuvwxyz")
    domain_names = tuple(STYLES)

    def load(self) -> ImagePool:
        """Draw the pool: 736 images, uint8 [n, 3, 32, 32], of which 184 are for testing."""
        import matplotlib  # slow to import, and not needed to know the names

        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        drawn = [
            (label, font, _letter(character, folder / font))
            for font in (*FONTS, *TEST_FONTS)
            for label, letter in enumerate(self.class_names)
            for character in (letter, letter.upper())
        ]
        domains = [number // 2 % len(STYLES) for number in range(len(drawn))]
        images = [
            rendered(image, self.domain_names[domain], "letters", number)
            for number, (domain, (_, _, image)) in enumerate(zip(domains, drawn, strict=True))
        ]
        return ImagePool(
            images=torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(),
            labels=torch.tensor([label for label, _, _ in drawn]),
            test=torch.tensor([font in TEST_FONTS for _, font, _ in drawn]),
            domains=torch.tensor(domains),
            group=torch.arange(len(drawn)),
        )


def _letter(character: str, font: Path) -> NDArray[np.uint8]:
    """Draw a letter on 8x8 pixels of 17 grey levels, as large as they allow, [8, 8]."""
    side = SIDE * FINER
    sheet = Image.new("L", (4 * side, 4 * side))
    ImageDraw.Draw(sheet).text((side, side), character, fill=255, font=ImageFont.truetype(str(font), side))
    letter = sheet.crop(sheet.getbbox())
    scale = side / max(letter.size)
    letter = letter.resize((max(1, round(letter.width * scale)), max(1, round(letter.height * scale))))
    square = Image.new("L", (side, side))
    square.paste(letter, ((side - letter.width) // 2, (side - letter.height) // 2))
    small = np.asarray(square.resize((SIDE, SIDE), Image.Resampling.BOX))
    return np.round(np.round(small * (16 / 255)) * (255 / 16)).astype(np.uint8)
