"""EuroSAT (Helber et al., "EuroSAT: A Novel Dataset and Deep Learning Benchmark", 2019), the RGB version."""

from typing import Any

from benchmark.ranges import Size
from datamodules.coop_layout import DownloadableCoOpSource

#: class names in CoOp's order, and their folders
CLASSES = {
    "Annual Crop Land": "AnnualCrop",
    "Forest": "Forest",
    "Herbaceous Vegetation Land": "HerbaceousVegetation",
    "Highway or Road": "Highway",
    "Industrial Buildings": "Industrial",
    "Pasture Land": "Pasture",
    "Permanent Crop Land": "PermanentCrop",
    "Residential Buildings": "Residential",
    "River": "River",
    "Sea or Lake": "SeaLake",
}


class EuroSAT(DownloadableCoOpSource):
    """Ten kinds of land, 13,500 train and 8,100 test images of 64 x 64, the size in which they are stored here too."""

    title = "EuroSAT"
    home = "https://github.com/phelber/EuroSAT"
    folders = ("eurosat",)
    images = "2750"
    layout = "2750/<class>/*.jpg"
    split_name = "EuroSAT"
    sizes = (13500, 8100)
    template = "a centered satellite photo of {}."
    class_names = tuple(CLASSES)

    def __init__(self, *arguments: Any, size: Size = 64, **settings: Any) -> None:
        super().__init__(*arguments, size=size, **settings)

    def class_folder(self, name: str) -> str:
        """The folder of a class's images."""
        return CLASSES[name]

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/eurosat``."""
        from torchvision import datasets  # slow to import

        datasets.EuroSAT(self.root, download=True)
