"""FGVC-Aircraft (Maji et al., "Fine-Grained Visual Classification of Aircraft", 2013)."""

from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.ranges import Size
from datamodules.coop_layout import SIDES, DownloadableCoOpSource, Listing, check_sides, read_lines


class FGVCAircraft(DownloadableCoOpSource):
    """100 variants of aircraft, 3,334 train and 3,333 test images.

    The split is the official one by variant, which CoOp takes as it is. Images are not cut: their lowest 20 lines name
    the photographer.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.
        download: let torchvision download the images into ``root`` if they are not there.
    """

    title = "FGVC-Aircraft"
    home = "https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/"
    folders = ("fgvc_aircraft", "fgvc-aircraft-2013b/data")
    images = "images"
    layout = "images/*.jpg, with images_variant_{train,val,test}.txt beside them"
    split_name = "FGVCAircraft"
    sizes = (3334, 3333)
    template = "a photo of a {}, a type of aircraft."
    # fmt: off
    class_names = (
        "707-320", "727-200", "737-200", "737-300", "737-400", "737-500", "737-600", "737-700", "737-800", "737-900",
        "747-100", "747-200", "747-300", "747-400", "757-200", "757-300", "767-200", "767-300", "767-400", "777-200",
        "777-300", "A300B4", "A310", "A318", "A319", "A320", "A321", "A330-200", "A330-300", "A340-200", "A340-300",
        "A340-500", "A340-600", "A380", "ATR-42", "ATR-72", "An-12", "BAE 146-200", "BAE 146-300", "BAE-125",
        "Beechcraft 1900", "Boeing 717", "C-130", "C-47", "CRJ-200", "CRJ-700", "CRJ-900", "Cessna 172", "Cessna 208",
        "Cessna 525", "Cessna 560", "Challenger 600", "DC-10", "DC-3", "DC-6", "DC-8", "DC-9-30", "DH-82", "DHC-1",
        "DHC-6", "DHC-8-100", "DHC-8-300", "DR-400", "Dornier 328", "E-170", "E-190", "E-195", "EMB-120", "ERJ 135",
        "ERJ 145", "Embraer Legacy 600", "Eurofighter Typhoon", "F-16A/B", "F/A-18", "Falcon 2000", "Falcon 900",
        "Fokker 100", "Fokker 50", "Fokker 70", "Global Express", "Gulfstream IV", "Gulfstream V", "Hawk T1", "Il-76",
        "L-1011", "MD-11", "MD-80", "MD-87", "MD-90", "Metroliner", "Model B200", "PA-28", "SR-20", "Saab 2000",
        "Saab 340", "Spitfire", "Tornado", "Tu-134", "Tu-154", "Yak-42",
    )
    # fmt: on

    def __init__(self, root: str = "data", size: Size = 224, download: bool = False) -> None:
        super().__init__(root, size=size, download=download)

    def fetch(self) -> None:
        """Let torchvision download it to ``<root>/fgvc-aircraft-2013b``."""
        from torchvision import datasets  # slow to import

        datasets.FGVCAircraft(self.root, download=True)

    def published(self, at: Path) -> Listing:
        """The images in ``images_variant_{train,val,test}.txt``, lines of number and variant."""
        known = {name: label for label, name in enumerate(self.class_names)}
        files: list[str] = []
        labels: list[int] = []
        sides: list[int] = []
        for side, called in enumerate(SIDES):
            path = at / f"images_variant_{called}.txt"
            for line in read_lines(path):
                number, _, variant = line.partition(" ")
                if variant not in known or not number.isalnum():
                    raise ConfigurationError(
                        f"{path} must have lines of an image's number and its variant, got {line!r}"
                    )
                files.append(f"{number}.jpg")
                labels.append(known[variant])
                sides.append(side)
        return check_sides(at, files, labels, sides)
