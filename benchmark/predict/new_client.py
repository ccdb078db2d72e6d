"""Labelled images of a client that was no part of a run."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmark.errors import ConfigurationError, listed
from benchmark.predict.files import decoding_of
from benchmark.predict.loaded import LabelledImages
from benchmark.run.federation_file import FederationFacts
from datamodules.folders import decode_images, file_statuses, list_images, subfolders
from datamodules.own_folders import folders_in


def labelled_images(folder: Path, facts: FederationFacts, number: int, name: str | None = None) -> LabelledImages:
    """Read the images of a new client, a folder a class; it need not have every class.

    Args:
        folder: with the class folders.
        facts: of the run.
        number: of the client.
        name: of the client; the folder's by default.

    Raises:
        ConfigurationError: there is no such folder, a folder of no class of the run or of several, two folders of one
            class, a folder in a class folder, no image, or one that cannot be read or lies elsewhere.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is no folder; give one with a folder of images for each class")
    labels_of = dict(enumerate(facts.terms.classes_in("train")))
    files: list[str] = []
    labels: list[int] = []
    for each, place in _places(folder, facts.names_for(number, "train")).items():
        if inner := folders_in(folder / each):
            raise ConfigurationError(
                f"{folder / each} holds the folder {inner[0]}, and a class folder holds images only; move its images "
                f"into {folder / each} itself"
            )
        images = list_images(folder, each)
        files += images
        labels += [labels_of[place]] * len(images)
    file_statuses(folder, files)  # refuses what is no file, and links that leave the folder
    how = decoding_of(facts)
    decoded = decode_images(lambda row: folder / files[row], len(files), how, folder, of_run=True)
    return LabelledImages(
        name or folder.resolve().name, torch.from_numpy(decoded.images), torch.from_numpy(np.array(labels))
    )


def _places(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Return of each class folder the place of its class among ``names``.

    A folder is of the class of exactly its name; else of the only class whose :func:`_plain` name is the folder's.

    Raises:
        ConfigurationError: there is no folder, one of no class or of several, or two of one class.
    """
    alike: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        alike.setdefault(_plain(name), []).append(place)
    exact = {name: [place] for place, name in enumerate(names)}
    found = {each: exact.get(each) or alike.get(_plain(each), []) for each in sorted(subfolders(folder))}
    strangers = [each for each, places in found.items() if not places]
    if strangers or not found:
        has = f"has {listed(strangers)}, of which the run knows nothing" if strangers else "holds no folder of a class"
        raise ConfigurationError(f"{folder} {has}; expected folders named as the run's classes: {listed(names)}")
    first: dict[int, str] = {}
    for each, places in found.items():
        if len(places) > 1:
            raise ConfigurationError(
                f"{folder / each} may be of {' or '.join(names[place] for place in places)}; name the folder exactly "
                "as the run's class"
            )
        if (other := first.setdefault(places[0], each)) != each:
            raise ConfigurationError(
                f"{folder} holds the class {names[places[0]]} twice: {other} and {each}; put the images into one folder"
            )
    return {each: places[0] for each, places in found.items()}


def _plain(name: str) -> str:
    """Return a class's name without case, spaces and signs other than plus, in which folders and names often differ."""
    return re.sub(r"[^\w+]|_", "", name).casefold() or name
