"""PACS (Li et al., "Deeper, Broader and Artier Domain Generalization", ICCV 2017)."""

from typing import ClassVar

from datamodules.domain_layout import DomainSource


class PACS(DomainSource):
    """9,991 images of seven classes in four domains: paintings, cartoons, photos and sketches.

    Read from ``<root>/PACS/<domain>/<class>/``, or from Dassl's ``<root>/pacs/images/<domain>/<class>/``. Each domain
    is split 80/20, stratified by class; the published lists, which serve training on some domains and testing on
    another, are not used. :class:`DomainSource` says what the arguments mean.
    """

    title = "PACS"
    home = "PACS (https://github.com/facebookresearch/DomainBed has a script for it)"
    folders = ("PACS", "pacs/images", "pacs", "pacs_data")
    spellings: ClassVar = {"art_painting": ("art_painting", "art painting")}
    sizes = (2048, 2344, 1670, 3929)
    key = "pacs"
    class_names = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    domain_names = ("art_painting", "cartoon", "photo", "sketch")
