"""VLCS (Fang et al., "Unbiased Metric Learning", ICCV 2013): classes that four data sets share."""

from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from datamodules.domain_layout import DomainSource
from datamodules.folders import list_class_folders


class VLCS(DomainSource):
    """10,729 images of five classes in four domains: Caltech-101, LabelMe, PASCAL VOC 2007 and SUN09.

    Read from ``<root>/VLCS/{Caltech101,LabelMe,VOC2007,SUN09}/<class>/`` (DomainBed's form), each domain split 80/20,
    stratified by class; or from ``<root>/VLCS/{CALTECH,LABELME,PASCAL,SUN}/{train,crossval,test}/<class>/`` (JiGen's
    and Dassl's), where ``train`` trains, ``test`` tests and ``crossval`` is left out. There folders may be the numbers
    0 to 4 of the classes. :class:`DomainSource` says what the arguments mean.
    """

    title = "VLCS"
    home = "VLCS (https://github.com/facebookresearch/DomainBed has a script for it)"
    folders = ("VLCS", "vlcs")
    spellings: ClassVar = {
        "caltech": ("Caltech101", "CALTECH"),
        "labelme": ("LabelMe", "LABELME"),
        "pascal": ("VOC2007", "PASCAL"),
        "sun": ("SUN09", "SUN"),
    } | {name: (name, str(number)) for number, name in enumerate(("bird", "car", "chair", "dog", "person"))}
    sizes = (1415, 2656, 3376, 3282)
    key = "vlcs"
    class_names = ("bird", "car", "chair", "dog", "person")
    domain_names = ("caltech", "labelme", "pascal", "sun")

    def list_domain(self, at: Path, below: str) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_] | None]:
        """A domain's images, with the sides of its folders ``train`` and ``test`` where it has one of them."""
        if not any((at / below / side).is_dir() for side in ("train", "test")):
            return super().list_domain(at, below)
        folders = [self.spelled(name) for name in self.class_names]
        train, train_labels = list_class_folders(at, f"{below}/train", folders)
        test, test_labels = list_class_folders(at, f"{below}/test", folders)
        sides = np.arange(len(train) + len(test)) >= len(train)
        return train + test, np.concatenate([train_labels, test_labels]), sides
