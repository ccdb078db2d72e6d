"""The Describable Textures Dataset (Cimpoi et al., "Describing Textures in the Wild", CVPR 2014)."""

from datamodules.coop_layout import DownloadableCoOpSource


class DTD(DownloadableCoOpSource):
    """47 textures, 2,820 train and 1,692 test images; CoOp does not use the official splits."""

    title = "DTD"
    home = "https://www.robots.ox.ac.uk/~vgg/data/dtd/"
    folders = ("dtd", "dtd/dtd")
    images = "images"
    layout = "images/<class>/*.jpg"
    split_name = "DescribableTextures"
    sizes = (2820, 1692)
    template = "{} texture."
    # fmt: off
    class_names = (
        "banded", "blotchy", "braided", "bubbly", "bumpy", "chequered", "cobwebbed", "cracked", "crosshatched",
        "crystalline", "dotted", "fibrous", "flecked", "freckled", "frilly", "gauzy", "grid", "grooved", "honeycombed",
        "interlaced", "knitted", "lacelike", "lined", "marbled", "matted", "meshed", "paisley", "perforated", "pitted",
        "pleated", "polka-dotted", "porous", "potholed", "scaly", "smeared", "spiralled", "sprinkled", "stained",
        "stratified", "striped", "studded", "swirly", "veined", "waffled", "woven", "wrinkled", "zigzagged",
    )
    # fmt: on

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/dtd/dtd``."""
        from torchvision import datasets  # slow to import

        datasets.DTD(self.root, download=True)
