"""Oxford-IIIT Pets (Parkhi et al., "Cats and Dogs", CVPR 2012)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from datamodules.coop_layout import DownloadableCoOpSource, check_numbers, read_lines


class OxfordPets(DownloadableCoOpSource):
    """37 breeds, 2,944 train and 3,669 test images; the test images are the official ones."""

    title = "Oxford Pets"
    home = "https://www.robots.ox.ac.uk/~vgg/data/pets/"
    folders = ("oxford_pets", "oxford-iiit-pet")
    images = "images"
    layout = "images/*.jpg and oxford_pets/annotations/{trainval,test}.txt"
    split_name = "OxfordPets"
    sizes = (2944, 3669)
    template = "a photo of a {}, a type of pet."
    # fmt: off
    class_names = (
        "abyssinian", "american bulldog", "american pit bull terrier", "basset hound", "beagle", "bengal", "birman",
        "bombay", "boxer", "british shorthair", "chihuahua", "egyptian mau", "english cocker spaniel", "english setter",
        "german shorthaired", "great pyrenees", "havanese", "japanese chin", "keeshond", "leonberger", "maine coon",
        "miniature pinscher", "newfoundland", "persian", "pomeranian", "pug", "ragdoll", "russian blue",
        "saint bernard", "samoyed", "scottish terrier", "shiba inu", "siamese", "sphynx", "staffordshire bull terrier",
        "wheaten terrier", "yorkshire terrier",
    )
    # fmt: on

    def list_files(self, at: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_] | None]:
        """The images of the official lists ``trainval.txt`` and ``test.txt``."""
        files: list[str] = []
        labels, test = [], []
        for number, side in enumerate(("trainval", "test")):
            path = at / "annotations" / f"{side}.txt"
            rows = [line.split() for line in read_lines(path)]
            if any(len(row) < 2 or not row[1].isdecimal() for row in rows):
                raise ConfigurationError(f"{path} must have lines of image, class number, species and breed")
            files += [f"{row[0]}.jpg" for row in rows]
            numbers = np.array([int(row[1]) for row in rows], dtype=np.int64)
            labels.append(check_numbers(path, numbers, len(self.class_names)))
            test.append(np.full(len(rows), number == 1))
        return files, np.concatenate(labels), np.concatenate(test)

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/oxford-iiit-pet``."""
        from torchvision import datasets  # slow to import

        datasets.OxfordIIITPet(self.root, download=True)
