"""MedMNIST (Yang et al., "MedMNIST v2 - A large-scale lightweight benchmark for 2D and 3D biomedical image
classification", Scientific Data 2023): its two-dimensional sets of one label an image.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from datamodules.folders import DecodedImages, without_copies
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import equal_images

HOME = "https://zenodo.org/records/10519652"
SIDES = ("train", "val", "test")
ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver", "lung-left"),
    *("lung-right", "pancreas", "spleen"),
)


@dataclass(frozen=True)
class Subset:
    """One of the sets.

    Attributes:
        name: its own, as MedMNIST writes it.
        class_names: in the order of the labels.
        sizes: train, validation and test images.
    """

    name: str
    class_names: tuple[str, ...]
    sizes: tuple[int, int, int]


SUBSETS = {
    "pathmnist": Subset(
        "PathMNIST",
        (
            *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa"),
            *("cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        ),
        (89996, 10004, 7180),
    ),
    "dermamnist": Subset(
        "DermaMNIST",
        (
            *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma"),
            *("benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi", "vascular lesions"),
        ),
        (7007, 1003, 2005),
    ),
    "octmnist": Subset(
        "OCTMNIST",
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        (97477, 10832, 1000),
    ),
    "pneumoniamnist": Subset("PneumoniaMNIST", ("normal", "pneumonia"), (4708, 524, 624)),
    "retinamnist": Subset("RetinaMNIST", ("0", "1", "2", "3", "4"), (1080, 120, 400)),
    "breastmnist": Subset("BreastMNIST", ("malignant", "normal, benign"), (546, 78, 156)),
    "bloodmnist": Subset(
        "BloodMNIST",
        (
            *("basophil", "eosinophil", "erythroblast"),
            "immature granulocytes(myelocytes, metamyelocytes and promyelocytes)",
            *("lymphocyte", "monocyte", "neutrophil", "platelet"),
        ),
        (11959, 1712, 3421),
    ),
    "tissuemnist": Subset(
        "TissueMNIST",
        (
            *("Collecting Duct, Connecting Tubule", "Distal Convoluted Tubule", "Glomerular endothelial cells"),
            *("Interstitial endothelial cells", "Leukocytes", "Podocytes", "Proximal Tubule Segments"),
            "Thick Ascending Limb",
        ),
        (165466, 23640, 47280),
    ),
    "organamnist": Subset("OrganAMNIST", ORGANS, (34561, 6491, 17778)),
    "organcmnist": Subset("OrganCMNIST", ORGANS, (12975, 2392, 8216)),
    "organsmnist": Subset("OrganSMNIST", ORGANS, (13932, 2452, 8827)),
}


class MedMNIST(ImageSource):
    """One of MedMNIST's two-dimensional sets, with its own split into train, validation and test images.

    Read from ``<root>/medmnist/<subset>.npz`` (28 pixels) or ``<subset>_<size>.npz`` (64, 128 and 224, of MedMNIST+),
    as they are published; pickled content is refused. Grey images get three equal channels, and all images are held in
    memory. A training image that is identical to a test image is left out. Labels are by image: MedMNIST says nothing
    of patients. ChestMNIST, of which an image can have several labels, and the sets of volumes are not read.

    Args:
        root: folder of all data sets.
        subset: which set.
        size: height and width of the images in pixels; each size is a file of its own.
        use_valid: what becomes of the validation images: ``none`` leaves them out, ``train`` trains on them.
    """

    title = "MedMNIST"

    def __init__(
        self,
        root: str = "data",
        subset: Literal[
            "pathmnist",
            "dermamnist",
            "octmnist",
            "pneumoniamnist",
            "retinamnist",
            "breastmnist",
            "bloodmnist",
            "tissuemnist",
            "organamnist",
            "organcmnist",
            "organsmnist",
        ] = "pathmnist",
        size: Literal[28, 64, 128, 224] = 28,
        use_valid: Literal["none", "train"] = "none",
    ) -> None:
        self.at = user_path(root) / "medmnist"
        self.file = f"{subset}.npz" if size == 28 else f"{subset}_{size}.npz"
        self.subset = SUBSETS[subset]
        self.size = size
        self.use_valid = use_valid
        self.name = self.subset.name
        self.class_names = self.subset.class_names

    @classmethod
    def name_by(cls, arguments: Mapping[str, Any]) -> str:
        """Return the subset's name."""
        return SUBSETS[arguments.get("subset", "pathmnist")].name

    @property
    def decoding(self) -> Decoding:
        """Return how a new image becomes stored pixels."""
        return Decoding(self.size, "squash")

    def load(self) -> ImagePool:
        """Read the images in use.

        Raises:
            ConfigurationError: the file is not there, is damaged, or is not of this set and size.
        """
        path = self.at / self.file
        if not path.is_file():
            raise self.missing(f"{self.name} is not in {self.at}: download {self.file} from {HOME} and put it there")
        labels = {side: self._labels(path, side) for side in SIDES}
        sizes = tuple(map(len, labels.values()))
        if sizes != self.subset.sizes:
            warnings.warn(
                f"{self.name} has {', '.join(map(str, self.subset.sizes))} train, validation and test images, {path} "
                f"has {', '.join(map(str, sizes))}: results compare with no published number",
                stacklevel=2,
            )
        used = [side for side in SIDES if side != "val" or self.use_valid == "train"]
        all_labels = np.concatenate([labels[side] for side in used])
        test = np.arange(len(all_labels)) >= len(all_labels) - len(labels["test"])
        try:
            images = np.empty((len(all_labels), 3, self.size, self.size), np.uint8)
            ends = np.cumsum([len(labels[side]) for side in used])
            for side, end in zip(used, ends, strict=True):
                images[end - len(labels[side]) : end] = self._images(path, side, len(labels[side]))
        except MemoryError as error:
            raise _too_large(path) from error
        decoded = DecodedImages(images, equal_images(images))
        return without_copies(decoded, all_labels, test, np.zeros_like(all_labels))

    def _labels(self, path: Path, side: str) -> NDArray[np.int64]:
        """Labels of a side, [n]."""
        labels = _array(path, f"{side}_labels")
        classes = len(self.class_names)
        right = labels.dtype.kind in "iu" and labels.ndim == 2 and labels.shape[1] == 1 and len(labels) > 0
        if not right or int(labels.min()) < 0 or int(labels.max()) >= classes:
            raise ConfigurationError(
                f"{path}: {side}_labels must be whole numbers from 0 to {classes - 1}, [n, 1], got {labels.dtype} "
                f"{list(labels.shape)}; get the file of {self.name} from {HOME}"
            )
        return labels[:, 0].astype(np.int64)

    def _images(self, path: Path, side: str, n: int) -> NDArray[np.uint8]:
        """Images of a side, uint8 [n, 1 or 3, size, size]."""
        images = _array(path, f"{side}_images")
        square = (n, self.size, self.size)
        if images.dtype != np.uint8 or images.shape not in (square, (*square, 3)):
            raise ConfigurationError(
                f"{path}: {side}_images must be uint8 {list(square)} or that with 3 channels, got {images.dtype} "
                f"{list(images.shape)}; get the file of {self.name} at {self.size} pixels from {HOME}"
            )
        return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


def _array(path: Path, name: str) -> NDArray[Any]:
    """One array of an ``.npz`` file; what would need unpickling is refused.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return np.asarray(arrays[name])
    except MemoryError as error:
        raise _too_large(path) from error
    except Exception as error:  # a damaged file makes the reader fail in many ways
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ConfigurationError(f"cannot read {name} from {path} ({said}); get the file from {HOME} again") from error


def _too_large(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"what {path} holds takes more memory than is free; take a smaller data.source.init_args.size, or get the file "
        f"from {HOME} again"
    )
