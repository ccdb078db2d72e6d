"""Folders of labelled images of a new client or of a site of a deployment."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmark.errors import ConfigurationError
from benchmark.federation import Terms
from benchmark.predict.files import decoded, decoding_of
from benchmark.predict.new_client import labelled_images
from benchmark.run.federation_file import FederationFacts
from datamodules.pixels import Decoding


def facts_of(*class_names: str, bits: int | None = None) -> FederationFacts:
    """Facts of one client that tells these classes apart, in images of 4 pixels a side."""
    count = len(class_names)
    terms = Terms(0, 1, (0,), (), 1, 8, False, 8, count, 8, 8)
    counts = torch.ones(1, count, dtype=torch.int64)
    how = Decoding(4, "squash", as_seen=True, bits=bits)
    return FederationFacts(terms, class_names, ("a",), 1, counts, (count,), (4, 4), how)


def ward(root: Path, *folders: str) -> Path:
    """A folder of a grey image in each of these folders, the darker the later it is named."""
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        Image.new("L", (4, 4), 200 - number).save(root / folder / "0.png")
    return root


def labels_by_folder(root: Path, facts: FederationFacts, *folders: str) -> list[int]:
    """The label of the image in each of these folders, as :func:`ward` has made them."""
    found = labelled_images(ward(root, *folders), facts, 0)
    shades = found.images[:, 0, 0, 0].tolist()
    return [found.labels[shades.index(200 - number)].item() for number in range(len(folders))]


@pytest.mark.parametrize("names", [("HER2+", "HER2-"), ("A", "a"), ("C", "C++", "C#")])
def test_classes_whose_names_differ_in_case_or_signs_are_told_apart(names: tuple[str, ...], tmp_path: Path) -> None:
    assert labels_by_folder(tmp_path / "there", facts_of(*names), *names) == [*range(len(names))]
    assert labels_by_folder(tmp_path / "back", facts_of(*names), *names[::-1]) == [*reversed(range(len(names)))]


def test_a_folder_whose_name_differs_in_signs_is_of_the_only_class_like_it(tmp_path: Path) -> None:
    assert labels_by_folder(tmp_path, facts_of("basal cell", "HER2+"), "her2+", "Basal-Cell") == [1, 0]


@pytest.mark.parametrize(
    ("names", "folders", "said"),
    [
        (("A b", "a-B"), ("ab",), r"ward/ab may be of A b or a-B; name the folder exactly as the run's class"),
        (("a b", "c"), ("a b", "A-B"), r"ward holds the class a b twice: A-B and a b; put the images into one folder"),
        (("HER2+", "none"), ("HER2-",), r"ward has HER2-, of which the run knows nothing; expected folders named"),
    ],
)
def test_a_folder_of_no_class_or_several_is_refused(
    names: tuple[str, ...], folders: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        labelled_images(ward(tmp_path / "ward", *folders), facts_of(*names), 0)


def test_what_would_go_unnoticed_or_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    facts = facts_of("cat", "dog")
    ward(tmp_path / "deep", "cat", "cat/more")
    with pytest.raises(
        ConfigurationError, match="deep/cat holds the folder more, and a class folder holds images only"
    ):
        labelled_images(tmp_path / "deep", facts, 0)
    os.mkfifo(ward(tmp_path / "pipe", "cat") / "cat/x.png")
    with pytest.raises(ConfigurationError, match=r"pipe/cat/x\.png is no regular file, and so no image"):
        labelled_images(tmp_path / "pipe", facts, 0)
    link = ward(tmp_path / "linked", "cat") / "cat/x.png"
    link.symlink_to(ward(tmp_path / "other", "dog") / "dog/0.png")
    with pytest.raises(ConfigurationError, match=r"linked/cat/x\.png leads outside of the data set's folder"):
        labelled_images(tmp_path / "linked", facts, 0)


def test_dark_images_of_16_bits_are_told_of_where_they_are_used(tmp_path: Path) -> None:
    ward(tmp_path, "cat", "dog")
    Image.fromarray(np.full((4, 4), 4095, dtype=np.uint16)).save(tmp_path / "cat/0.png")
    said = "1 images have 16 bits and are nearly black: largest value 4095 of 65535; the run was trained without data"
    facts = facts_of("cat", "dog")
    with pytest.warns(UserWarning, match=f"the images to classify: {said}"):
        [*decoded([tmp_path / "cat/0.png", tmp_path / "dog/0.png"], decoding_of(facts))]
    with pytest.warns(UserWarning, match=said):
        labelled_images(tmp_path, facts, 0)


@pytest.mark.filterwarnings("error")
def test_files_of_8_bits_are_as_they_are_to_a_run_with_bits(tmp_path: Path) -> None:
    facts = facts_of("cat", "dog", bits=12)
    assert labels_by_folder(tmp_path, facts, "cat", "dog") == [0, 1]
    ((_, pixels),) = decoded([tmp_path / "cat/0.png"], decoding_of(facts))
    assert (np.asarray(pixels) == 200).all()
