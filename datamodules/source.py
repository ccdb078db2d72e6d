"""The interface of a data set: one pool of images in memory, and the names of its classes and domains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked
from datamodules.pixels import Decoding

#: Types of what a pool holds; labels come first, since all others are as many.
KINDS = {
    "labels": torch.int64,
    "images": torch.uint8,
    "test": torch.bool,
    "domains": torch.int64,
    "group": torch.int64,
}


@dataclass(frozen=True)
class ImagePool:
    """All images of a data set, train and test together; a partition is a set of indices into it.

    Attributes:
        images: uint8, [n, 3, H, W], at stored size; may be backed by a memory-mapped file.
        labels: int64, [n], index into the source's ``class_names``.
        test: bool, [n], True for images of the official (or fixed) test set.
        domains: int64, [n], index into the source's ``domain_names``; all zero where there is one domain.
        group: int64, [n]: images with an equal value show the same thing (byte-identical files, one digit
            drawn in several styles) and must all be on one side of every train/test split.
    """

    images: Tensor
    labels: Tensor
    test: Tensor
    domains: Tensor
    group: Tensor

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            values = getattr(self, name)
            if not isinstance(values, Tensor):
                raise ConfigurationError(
                    f"a source's {name} must be a torch tensor, got {type(values).__name__}; torch.as_tensor makes one"
                )
            images = name == "images"
            right = values.ndim == 4 and values.shape[1] == 3 if images else values.ndim == 1
            if values.dtype != kind or not right:
                shape, more = "[n]", ""
                if images:
                    shape, more = "[n, 3, H, W]", "; images of another mode become so by PIL's convert('RGB')"
                raise ConfigurationError(
                    f"a source's {name} must be {str(kind).removeprefix('torch.')} {shape}, got {values.dtype} "
                    f"{tuple(values.shape)}{more}"
                )
            if len(values) != len(self.labels):
                raise ConfigurationError(f"a source has {len(values)} rows of {name}, and {len(self.labels)} labels")

    def check_names(self, source: "ImageSource") -> None:
        """Refuse labels and domains that the source has no names for.

        Raises:
            ConfigurationError: such a label or domain, or no image.
        """
        if not len(self.labels):
            raise ConfigurationError(
                f"{type(source).__name__}.load gives no images, expected at least one: see that it reads the right "
                "folder"
            )
        for name, values, names in (
            ("labels", self.labels, source.class_names),
            ("domains", self.domains, source.domain_names),
        ):
            least, most = (int(end) for end in values.aminmax())
            if least < 0 or most >= len(names):
                raise ConfigurationError(
                    f"{type(source).__name__} has {name} from {least} to {most}, and names for {len(names)} of them; "
                    f"expected 0 to {len(names) - 1}"
                )


class ImageSource(Checked):
    """A data set. Subclasses set the names and read the images; no image is read before ``load``.

    Class and domain names are ordered tuples, fixed in code or set by the constructor from what the data say: a label
    is an index into them, in every process. ``template`` is CoOp's wording for CLIP on this data set, ``{}`` the
    class's place; a method with a template takes it as its own ``model.init_args.template``. ``name`` is what records
    call the data set, where it is not the class's name; a source of many data sets takes it as an argument of that
    name. ``title`` is what a reader calls the data set, where that is another word; ``embedded`` says that its images
    come with the code; ``test_only`` that nobody trains on it: all of its images test, as the last of several data sets
    (``ClassesOfDataSets.unseen``) or as a stream (``data.ood``).
    """

    name: str | None = None
    title: ClassVar[str | None] = None
    embedded: ClassVar[bool] = False
    test_only: ClassVar[bool] = False
    class_names: tuple[str, ...]
    template: str = "a photo of a {}."
    domain_names: tuple[str, ...] = ("",)

    @property
    def data_sets(self) -> dict[str, tuple[int, ...]]:
        """Return the labels of each data set in it by name: one, with all classes. Their names differ within each."""
        return {self.recorded_name: tuple(range(len(self.class_names)))}

    @property
    def class_templates(self) -> list[str]:
        """Return the template of each class."""
        return [self.template] * len(self.class_names)

    @property
    def decoding(self) -> Decoding | None:
        """Return how an image's file becomes stored pixels; None where the data set has no file for each image.

        New images are read so when a trained model is used, and where it is None as :class:`Decoding` with ``as_seen``.
        """
        return None

    @property
    def recorded_name(self) -> str:
        """The name of the data set in records."""
        return self.name or type(self).__name__

    @property
    def image_columns(self) -> tuple[str, ...]:
        """Return names of what is known of each image beside its class, such as ``sex``; as a rule there are none."""
        return ()

    def image_column(self, name: str) -> list[str]:
        """Return the values of one of :attr:`image_columns`, a text for each image of the pool that ``load`` returned.

        A text is empty where nothing is known.
        """
        raise ConfigurationError(f"the images of {self.recorded_name} come without a column {name!r:.80}")

    @classmethod
    def name_by(cls, arguments: Mapping[str, Any]) -> str:
        """Return the name that a source made with these arguments, as a configuration has them, has in records."""
        return arguments.get("name") or cls.__name__

    def may_train(self, pool: "ImagePool") -> Tensor:
        """Return which images of the pool clients may train on, bool [n]: all, unless the source is ``test_only``."""
        return torch.full((len(pool.labels),), not self.test_only)

    def missing(self, said: str) -> ConfigurationError:
        """The error of a data set, or a part of it, that is not there.

        Args:
            said: what is missing where, and how it gets there by hand.
        """
        folder = "give that as data.source.init_args.root (of a table, --data_dir or DATA_DIR)"
        download = ", or let it be downloaded with data.source.init_args.download=true"
        can_be = getattr(self, "download", None) is False
        return ConfigurationError(f"{said}; if it is in another folder, {folder}{download if can_be else ''}")

    def load(self) -> ImagePool:
        """Read (and where the official release allows it, download) the data set.

        Raises:
            ConfigurationError: the data are not there (the message says what to download and where to put
                it), or an image cannot be decoded.
        """
        raise NotImplementedError


def require_names(source: ImageSource) -> None:
    """Refuse a source without names of its classes, with names that are no texts, or with one name twice.

    Raises:
        ConfigurationError: it is so.
    """
    if not hasattr(source, "class_names"):
        raise ConfigurationError(
            f"{type(source).__name__} has no class_names; a source sets them, in the class or in its constructor"
        )
    for kind, given in (("class_names", source.class_names), ("domain_names", source.domain_names)):
        if isinstance(given, str):
            found = [f"the text {given!r:.80} as"]
        else:
            found = [f"{name!r:.80} ({type(name).__name__}) in" for name in given if not isinstance(name, str)]
        if found:
            raise ConfigurationError(
                f"{type(source).__name__} has {found[0]} its {kind}; expected a tuple of texts, such as ('cat', 'dog')"
            )
    of_each = [("class_names", [source.class_names[label] for label in labels]) for labels in source.data_sets.values()]
    for kind, names in [*of_each, ("domain_names", [*source.domain_names])]:
        twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
        if twice is not None:
            raise ConfigurationError(
                f"{type(source).__name__} has {twice!r} twice in its {kind}; give each a name of its own"
            )


def require_training_images(source: ImageSource) -> None:
    """Refuse a source that clients cannot train on.

    Raises:
        ConfigurationError: it has test images alone.
    """
    if source.test_only:
        raise ConfigurationError(
            f"{type(source).__name__} has test images alone, and clients need images to train on; put it behind "
            "another data set in the sources of datamodules.SeveralDataSets, with the partition "
            "datamodules.ClassesOfDataSets and its unseen"
        )


def load_pool(source: ImageSource) -> ImagePool:
    """Load a source's images, and check what it hands over.

    Raises:
        ConfigurationError: a file cannot be read, it is no pool, or has labels or domains without name.
    """
    name = type(source).__name__
    try:
        pool = source.load()
    except OSError as error:
        raise ConfigurationError(f"{name}.load cannot read its data: {error}") from error
    if not isinstance(pool, ImagePool):
        raise ConfigurationError(f"{name}.load must return an ImagePool, got {type(pool).__name__}")
    pool.check_names(source)
    return pool
