"""Caltech-101 (Fei-Fei et al., "Learning Generative Visual Models from Few Training Examples", 2004)."""

from datamodules.coop_layout import DownloadableCoOpSource

#: CoOp's names where they are not the folders'
FOLDERS = {"face": "Faces", "leopard": "Leopards", "motorbike": "Motorbikes", "airplane": "airplanes"}


class Caltech101(DownloadableCoOpSource):
    """100 classes, 4,128 train and 2,465 test images; without ``BACKGROUND_Google`` and ``Faces_easy``, as in CoOp."""

    title = "Caltech-101"
    home = "https://data.caltech.edu/records/mzrjq-6wc02"
    folders = ("caltech-101", "caltech101")
    images = "101_ObjectCategories"
    layout = "101_ObjectCategories/<class>/*.jpg"
    split_name = "Caltech101"
    sizes = (4128, 2465)
    ignored = ("BACKGROUND_Google", "Faces_easy")
    # fmt: off
    class_names = (
        "face", "leopard", "motorbike", "accordion", "airplane", "anchor", "ant", "barrel", "bass", "beaver",
        "binocular", "bonsai", "brain", "brontosaurus", "buddha", "butterfly", "camera", "cannon", "car side",
        "ceiling fan", "cellphone", "chair", "chandelier", "cougar body", "cougar face", "crab", "crayfish",
        "crocodile", "crocodile head", "cup", "dalmatian", "dollar bill", "dolphin", "dragonfly", "electric guitar",
        "elephant", "emu", "euphonium", "ewer", "ferry", "flamingo", "flamingo head", "garfield", "gerenuk",
        "gramophone", "grand piano", "hawksbill", "headphone", "hedgehog", "helicopter", "ibis", "inline skate",
        "joshua tree", "kangaroo", "ketch", "lamp", "laptop", "llama", "lobster", "lotus", "mandolin", "mayfly",
        "menorah", "metronome", "minaret", "nautilus", "octopus", "okapi", "pagoda", "panda", "pigeon", "pizza",
        "platypus", "pyramid", "revolver", "rhino", "rooster", "saxophone", "schooner", "scissors", "scorpion",
        "sea horse", "snoopy", "soccer ball", "stapler", "starfish", "stegosaurus", "stop sign", "strawberry",
        "sunflower", "tick", "trilobite", "umbrella", "watch", "water lilly", "wheelchair", "wild cat", "windsor chair",
        "wrench", "yin yang",
    )
    # fmt: on

    def class_folder(self, name: str) -> str:
        """The folder of a class's images."""
        return FOLDERS.get(name, super().class_folder(name))

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/caltech101``."""
        from torchvision import datasets  # slow to import

        datasets.Caltech101(self.root, download=True)
