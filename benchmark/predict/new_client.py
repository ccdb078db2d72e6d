"""Labelled images of a client that was no part of a run."""

import re
from pathlib import Path

import numpy as np
import torch

from benchmark.errors import ConfigurationError, listed
from benchmark.predict.files import decoding_of
from benchmark.predict.loaded import LabelledImages
from benchmark.run.federation_file import FederationFacts
from datamodules.folders import decode_images, list_images, subfolders


def labelled_images(folder: Path, facts: FederationFacts, number: int, name: str | None = None) -> LabelledImages:
    """Read the images of a new client, a folder a class; it need not have every class.

    Args:
        folder: with the class folders.
        facts: of the run.
        number: of the client.
        name: of the client; the folder's by default.

    Raises:
        ConfigurationError: there is no such folder, a folder of no class of the run, no image, or one that cannot be
            read.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder; give one with a folder of images for each class")
    known = {_plain(each): label for label, each in enumerate(facts.names_for(number, "train"))}
    labels_of = dict(enumerate(facts.terms.classes_in("train")))
    found = sorted(subfolders(folder))
    strangers = [each for each in found if _plain(each) not in known]
    if strangers or not found:
        classes = listed(facts.names_for(number, "train"))
        has = f"has {listed(strangers)}, of which the run knows nothing" if strangers else "holds no folder of a class"
        raise ConfigurationError(f"{folder} {has}; expected folders named as the run's classes: {classes}")
    files: list[str] = []
    labels: list[int] = []
    for each in found:
        images = list_images(folder, each)
        files += images
        labels += [labels_of[known[_plain(each)]]] * len(images)
    how = decoding_of(facts)
    decoded = decode_images(lambda row: folder / files[row], len(files), how, folder)
    return LabelledImages(
        name or folder.resolve().name, torch.from_numpy(decoded.images), torch.from_numpy(np.array(labels))
    )


def _plain(name: str) -> str:
    """Return a class's name without case, spaces and dashes, in which folders and names often differ."""
    return re.sub(r"[\W_]", "", name).casefold() or name
