"""TinyImageNet (Stanford CS231n, 2015): 200 classes of ImageNet at 64 x 64."""

import warnings
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from datamodules.archives import fetch, unpack_folder
from datamodules.folders import list_class_folders, read_images, without_copies
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource

URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
FOLDERS = ("tiny-imagenet-200", "tiny_imagenet_200", "tiny_imagenet_200_subset")

#: WordNet id of each class in sorted order, and the first of its names in ``words.txt``.
# fmt: off
CLASSES = {
    "n01443537": "goldfish", "n01629819": "European fire salamander", "n01641577": "bullfrog",
    "n01644900": "tailed frog", "n01698640": "American alligator", "n01742172": "boa constrictor",
    "n01768244": "trilobite", "n01770393": "scorpion", "n01774384": "black widow", "n01774750": "tarantula",
    "n01784675": "centipede", "n01855672": "goose", "n01882714": "koala", "n01910747": "jellyfish",
    "n01917289": "brain coral", "n01944390": "snail", "n01945685": "slug", "n01950731": "sea slug",
    "n01983481": "American lobster", "n01984695": "spiny lobster", "n02002724": "black stork",
    "n02056570": "king penguin", "n02058221": "albatross", "n02074367": "dugong", "n02085620": "Chihuahua",
    "n02094433": "Yorkshire terrier", "n02099601": "golden retriever", "n02099712": "Labrador retriever",
    "n02106662": "German shepherd", "n02113799": "standard poodle", "n02123045": "tabby", "n02123394": "Persian cat",
    "n02124075": "Egyptian cat", "n02125311": "cougar", "n02129165": "lion", "n02132136": "brown bear",
    "n02165456": "ladybug", "n02190166": "fly", "n02206856": "bee", "n02226429": "grasshopper",
    "n02231487": "walking stick", "n02233338": "cockroach", "n02236044": "mantis", "n02268443": "dragonfly",
    "n02279972": "monarch", "n02281406": "sulphur butterfly", "n02321529": "sea cucumber", "n02364673": "guinea pig",
    "n02395406": "hog", "n02403003": "ox", "n02410509": "bison", "n02415577": "bighorn", "n02423022": "gazelle",
    "n02437312": "Arabian camel", "n02480495": "orangutan", "n02481823": "chimpanzee", "n02486410": "baboon",
    "n02504458": "African elephant", "n02509815": "lesser panda", "n02666196": "abacus", "n02669723": "academic gown",
    "n02699494": "altar", "n02730930": "apron", "n02769748": "backpack", "n02788148": "bannister",
    "n02791270": "barbershop", "n02793495": "barn", "n02795169": "barrel", "n02802426": "basketball",
    "n02808440": "bathtub", "n02814533": "beach wagon", "n02814860": "beacon", "n02815834": "beaker",
    "n02823428": "beer bottle", "n02837789": "bikini", "n02841315": "binoculars", "n02843684": "birdhouse",
    "n02883205": "bow tie", "n02892201": "brass", "n02906734": "broom", "n02909870": "bucket",
    "n02917067": "bullet train", "n02927161": "butcher shop", "n02948072": "candle", "n02950826": "cannon",
    "n02963159": "cardigan", "n02977058": "cash machine", "n02988304": "CD player", "n02999410": "chain",
    "n03014705": "chest", "n03026506": "Christmas stocking", "n03042490": "cliff dwelling",
    "n03085013": "computer keyboard", "n03089624": "confectionery", "n03100240": "convertible", "n03126707": "crane",
    "n03160309": "dam", "n03179701": "desk", "n03201208": "dining table", "n03250847": "drumstick",
    "n03255030": "dumbbell", "n03355925": "flagpole", "n03388043": "fountain", "n03393912": "freight car",
    "n03400231": "frying pan", "n03404251": "fur coat", "n03424325": "gasmask", "n03444034": "go-kart",
    "n03447447": "gondola", "n03544143": "hourglass", "n03584254": "iPod", "n03599486": "jinrikisha",
    "n03617480": "kimono", "n03637318": "lampshade", "n03649909": "lawn mower", "n03662601": "lifeboat",
    "n03670208": "limousine", "n03706229": "magnetic compass", "n03733131": "maypole", "n03763968": "military uniform",
    "n03770439": "miniskirt", "n03796401": "moving van", "n03804744": "nail", "n03814639": "neck brace",
    "n03837869": "obelisk", "n03838899": "oboe", "n03854065": "organ", "n03891332": "parking meter",
    "n03902125": "pay-phone", "n03930313": "picket fence", "n03937543": "pill bottle", "n03970156": "plunger",
    "n03976657": "pole", "n03977966": "police van", "n03980874": "poncho", "n03983396": "pop bottle",
    "n03992509": "potter's wheel", "n04008634": "projectile", "n04023962": "punching bag", "n04067472": "reel",
    "n04070727": "refrigerator", "n04074963": "remote control", "n04099969": "rocking chair", "n04118538": "rugby ball",
    "n04133789": "sandal", "n04146614": "school bus", "n04149813": "scoreboard", "n04179913": "sewing machine",
    "n04251144": "snorkel", "n04254777": "sock", "n04259630": "sombrero", "n04265275": "space heater",
    "n04275548": "spider web", "n04285008": "sports car", "n04311004": "steel arch bridge", "n04328186": "stopwatch",
    "n04356056": "sunglasses", "n04366367": "suspension bridge", "n04371430": "swimming trunks", "n04376876": "syringe",
    "n04398044": "teapot", "n04399382": "teddy", "n04417672": "thatch", "n04456115": "torch", "n04465501": "tractor",
    "n04486054": "triumphal arch", "n04487081": "trolleybus", "n04501370": "turnstile", "n04507155": "umbrella",
    "n04532106": "vestment", "n04532670": "viaduct", "n04540053": "volleyball", "n04560804": "water jug",
    "n04562935": "water tower", "n04596742": "wok", "n04597913": "wooden spoon", "n06596364": "comic book",
    "n07579787": "plate", "n07583066": "guacamole", "n07614500": "ice cream", "n07615774": "ice lolly",
    "n07695742": "pretzel", "n07711569": "mashed potato", "n07715103": "cauliflower", "n07720875": "bell pepper",
    "n07734744": "mushroom", "n07747607": "orange", "n07749582": "lemon", "n07753592": "banana",
    "n07768694": "pomegranate", "n07871810": "meat loaf", "n07873807": "pizza", "n07875152": "potpie",
    "n07920052": "espresso", "n09193705": "alp", "n09246464": "cliff", "n09256479": "coral reef",
    "n09332890": "lakeside", "n09428293": "seashore", "n12267677": "acorn",
}
# fmt: on


class TinyImageNet(ImageSource):
    """200 classes with 500 train and 50 test images each; the official validation set is the test set.

    The official test set has no labels and is not used. Classes are in the order of their WordNet ids. Read from
    the first of ``<root>/{tiny-imagenet-200,tiny_imagenet_200,tiny_imagenet_200_subset}`` that is there: each side in
    the official layout (``train/<wnid>/images/*.JPEG``, ``val/images/*.JPEG`` with ``val/val_annotations.txt``) or in
    plain folders (``{train,val}/<wnid>/*.JPEG``). All give the same order of images. ``<root>/tiny-imagenet-200.zip``
    is unpacked if none of them is there. Training copies of test images are left out.

    Args:
        root: folder of all data sets.
        download: download the official archive (237 MB) into ``root`` if it is not there.
    """

    class_names = tuple(CLASSES.values())

    def __init__(self, root: str = "data", download: bool = False) -> None:
        self.root = user_path(root)
        self.download = download

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(64, "squash")

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them."""
        at = self._folder()
        train_files, train_labels = self._in_folders(at, "train")
        official = (at / "val" / "images").is_dir()
        test_files, test_labels = annotated_images(at) if official else self._in_folders(at, "val")
        if (len(train_files), len(test_files)) != (100_000, 10_000):
            warnings.warn(
                f"TinyImageNet has 100000 train and 10000 test images, {at} has {len(train_files)} and "
                f"{len(test_files)}: results compare with no published number",
                stacklevel=2,
            )
        labels = np.concatenate([train_labels, test_labels])
        test = np.arange(len(labels)) >= len(train_labels)
        decoded = read_images(at, train_files + test_files, self.decoding.size, self.decoding.fit)
        return without_copies(decoded, labels, test, np.zeros_like(labels))

    @staticmethod
    def _in_folders(at: Path, side: str) -> tuple[list[str], NDArray[np.int64]]:
        """A side's images, which lie in folders ``images`` of the classes' or in these themselves."""
        inside = "images" if any((at / side / wnid / "images").is_dir() for wnid in CLASSES) else "."
        return list_class_folders(at, side, [[wnid] for wnid in CLASSES], inside=inside)

    def _folder(self) -> Path:
        """The folder of the data set, unpacked or downloaded where necessary."""
        for name in FOLDERS:
            if (self.root / name).is_dir():
                return self.root / name
        to, archive = self.root / FOLDERS[0], self.root / f"{FOLDERS[0]}.zip"
        if not archive.is_file():
            if not self.download:
                raise self.missing(
                    f"TinyImageNet is not in {self.root}: download {URL} and put it there as it is or unpacked, "
                    f"or put plain folders there as {self.root / FOLDERS[1]}/{{train,val}}/<WordNet id>/*.JPEG"
                )
            fetch(URL, archive, MD5)
        unpack_folder(archive, FOLDERS[0], to, lambda path: path.parts[1:2] != ("test",))
        return to


def annotated_images(at: Path) -> tuple[list[str], NDArray[np.int64]]:
    """Validation images of the official layout, by class and name, and their labels, [n].

    Raises:
        ConfigurationError: a line of ``val_annotations.txt`` is not a file name and one of the 200 WordNet ids, or
            repeats a file.
    """
    path = at / "val" / "val_annotations.txt"
    number = {wnid: label for label, wnid in enumerate(CLASSES)}
    listed: dict[str, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path} ({error}); unpack the official archive again") from error
    for line in lines:
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in number or PurePosixPath(name).name != name or name in listed:
            raise ConfigurationError(
                f"{path}: expected a new file name, a tab and one of the 200 WordNet ids in each line, got {line!r}; "
                "unpack the official archive again"
            )
        listed[name] = number[wnid]
    rows = sorted((label, f"val/images/{name}") for name, label in listed.items())
    return [file for _, file in rows], np.array([label for label, _ in rows], dtype=np.int64)
