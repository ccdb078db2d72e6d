"""Paths that a command is given, looked at before any library is imported."""

import os
from pathlib import Path

from benchmark.errors import ConfigurationError

NEEDED = "give an image, a folder of images, or a list of them (CSV)"


def check_there(images: Path) -> None:
    """Refuse a path of images at which there is nothing.

    Raises:
        ConfigurationError: there is nothing.
    """
    if not os.path.lexists(images):
        raise ConfigurationError(f"there is no {images}; {NEEDED}")
