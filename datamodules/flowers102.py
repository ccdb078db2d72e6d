"""Flowers-102 (Nilsback and Zisserman, "Automated Flower Classification over a Large Number of Classes", 2008)."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from datamodules.coop_layout import DownloadableCoOpSource, check_numbers, read_mat


class Flowers102(DownloadableCoOpSource):
    """102 classes, 4,093 train and 2,463 test images; CoOp does not use the official split."""

    title = "Flowers-102"
    home = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
    folders = ("oxford_flowers", "flowers-102")
    images = "jpg"
    layout = "jpg/image_*.jpg and oxford_flowers/imagelabels.mat"
    split_name = "OxfordFlowers"
    sizes = (4093, 2463)
    template = "a photo of a {}, a type of flower."
    # fmt: off
    class_names = (
        "pink primrose", "hard-leaved pocket orchid", "canterbury bells", "sweet pea", "english marigold", "tiger lily",
        "moon orchid", "bird of paradise", "monkshood", "globe thistle", "snapdragon", "colt's foot", "king protea",
        "spear thistle", "yellow iris", "globe-flower", "purple coneflower", "peruvian lily", "balloon flower",
        "giant white arum lily", "fire lily", "pincushion flower", "fritillary", "red ginger", "grape hyacinth",
        "corn poppy", "prince of wales feathers", "stemless gentian", "artichoke", "sweet william", "carnation",
        "garden phlox", "love in the mist", "mexican aster", "alpine sea holly", "ruby-lipped cattleya", "cape flower",
        "great masterwort", "siam tulip", "lenten rose", "barbeton daisy", "daffodil", "sword lily", "poinsettia",
        "bolero deep blue", "wallflower", "marigold", "buttercup", "oxeye daisy", "common dandelion", "petunia",
        "wild pansy", "primula", "sunflower", "pelargonium", "bishop of llandaff", "gaura", "geranium", "orange dahlia",
        "pink-yellow dahlia", "cautleya spicata", "japanese anemone", "black-eyed susan", "silverbush",
        "californian poppy", "osteospermum", "spring crocus", "bearded iris", "windflower", "tree poppy", "gazania",
        "azalea", "water lily", "rose", "thorn apple", "morning glory", "passion flower", "lotus", "toad lily",
        "anthurium", "frangipani", "clematis", "hibiscus", "columbine", "desert-rose", "tree mallow", "magnolia",
        "cyclamen", "watercress", "canna lily", "hippeastrum", "bee balm", "ball moss", "foxglove", "bougainvillea",
        "camellia", "mallow", "mexican petunia", "bromelia", "blanket flower", "trumpet creeper", "blackberry lily",
    )
    # fmt: on

    def list_files(self, at: Path) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_] | None]:
        """Image i of ``jpg/`` has the i-th label of ``imagelabels.mat``."""
        path = at / "imagelabels.mat"
        labels = check_numbers(path, read_mat(path, "labels").astype(np.int64), len(self.class_names))
        return [f"image_{number + 1:05d}.jpg" for number in range(len(labels))], labels, None

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/flowers-102``."""
        from torchvision import datasets  # slow to import

        datasets.Flowers102(self.root, download=True)
