"""Office-Caltech10 (Gong et al., "Geodesic Flow Kernel for Unsupervised Domain Adaptation", CVPR 2012)."""

from typing import ClassVar

from datamodules.domain_layout import DomainSource


class OfficeCaltech10(DomainSource):
    """2,533 images of ten classes in four domains, in FedBN's order of classes and domains.

    Read from ``<root>/office_caltech10/{amazon,caltech,dslr,webcam}/<class>/``. FedBN's split is not published with the
    data set: each domain is split 80/20, stratified by class, with FedBN's counts (train 766/898/125/236, test
    192/225/32/59). Images with a byte-identical copy train.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.
        split_seed: seed of the split into train and test.
        fit: ``squash`` resizes to a square, ``crop`` resizes the short side and cuts out the centre (CLIP's way).
    """

    title = "Office-Caltech10"
    home = "the ten classes that Office-31 and Caltech-256 share (https://faculty.cc.gatech.edu/~judy/domainadapt/)"
    folders = ("office_caltech10",)
    spellings: ClassVar = {
        "back_pack": ("back_pack", "backpack"),
        "laptop_computer": ("laptop_computer", "laptop"),
        "caltech": ("caltech", "caltech10"),
    }
    sizes = (958, 1123, 157, 295)
    key = "office_caltech10"
    class_names = (
        "back_pack",
        "bike",
        "calculator",
        "headphones",
        "keyboard",
        "laptop_computer",
        "monitor",
        "mouse",
        "mug",
        "projector",
    )
    domain_names = ("amazon", "caltech", "dslr", "webcam")
