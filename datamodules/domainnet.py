"""Ten classes of DomainNet (Peng et al., "Moment Matching for Multi-Source Domain Adaptation", ICCV 2019)."""

import warnings
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.ranges import Seed, Size
from benchmark.seeds import numpy_generator
from datamodules.archives import fetch, unpack_folder
from datamodules.folders import DecodedImages, Fit, list_class_folders, pool_of, read_images
from datamodules.pixels import Decoding
from datamodules.source import ImagePool, ImageSource
from datamodules.splitting import draw_in_proportion, draw_test

URL = "http://csr.bu.edu/ftp/visda/2019/multi-source"

#: Files of the cleaned release below ``URL``, with their MD5 sums.
ARCHIVES = {
    "clipart": ("groundtruth/clipart.zip", "cd0d8f2d77a4e181449b78ed62bccf1e"),
    "infograph": ("infograph.zip", "720380b86f9e6ab4805bb38b6bd135f8"),
    "painting": ("groundtruth/painting.zip", "1ae32cdb4f98fe7ab5eb0a351768abfd"),
    "quickdraw": ("quickdraw.zip", "bdc1b6f09f277da1a263389efe0c7a66"),
    "real": ("real.zip", "dcc47055e8935767784b7162e7c7cca6"),
    "sketch": ("sketch.zip", "658d8009644040ff7ce30bb2e820850f"),
}
LISTS = {
    "clipart_train.txt": "b4349693a7f9c05c53955725c47ed6cb",
    "clipart_test.txt": "f5ddbcfd657a3acf9d0f7da10db22565",
    "infograph_train.txt": "379b50054f4ac2018dca4f89421b92d9",
    "infograph_test.txt": "779626b50869edffe8ea6941c3755c71",
    "painting_train.txt": "7db0e7ca73ad9982f6e1f7f3ef372c0a",
    "painting_test.txt": "232b35dc53f26d414686ae579e38d9b5",
    "quickdraw_train.txt": "b732ced3939ac8efdd8c0a889dca56cc",
    "quickdraw_test.txt": "c1a828fdfe216fb109f1c0083a252c6f",
    "real_train.txt": "8ebf02c2075fadd564705f0dc7cd6291",
    "real_test.txt": "6098816791c3ebed543c71ffa11b9054",
    "sketch_train.txt": "1233bd18aa9a8a200bf4cecf1c34ef3e",
    "sketch_test.txt": "d8a222e4672cfd585298aa14d02ea441",
}

#: Test images of each domain in published results.
TEST_SIZES = {"official": (788, 912, 922, 1500, 1806, 818), "fedbn": (526, 657, 619, 1000, 1217, 554)}


class DomainNet10(ImageSource):
    """FedBN's ten classes in six domains, in FedBN's order of classes and domains.

    Read from ``<root>/domainnet/<domain>/<class>/``, where folders of other classes are passed over, and resized.
    Zip files of the official release put into ``<root>/domainnet`` are unpacked, these ten classes only. Pickled
    lists are never read. Images come by domain, class and name, whatever the split.

    Args:
        root: folder of all data sets.
        size: height and width of the stored images in pixels.
        fit: ``squash`` resizes to a square, ``crop`` resizes the short side and cuts out the centre (CLIP's way).
        split: ``official`` takes ``<domain>_{train,test}.txt`` of the cleaned release, beside the images or in
            ``splits`` (clipart then has 1,830 training images). ``fedbn`` takes such files from
            ``<root>/domainnet/fedbn`` where that folder is there. FedBN publishes its lists as pickles, so that
            otherwise each domain is split 80/20, stratified by class: with FedBN's images FedBN's counts
            (train 2103/2626/2472/4000/4864/2213, test 526/657/619/1000/1217/554), but not its very lists. Images with
            a byte-identical copy then train; with lists, training copies of test images are left out.
        balance: shrink every domain's training set to the smallest one, stratified by class (pFedBayesPT).
        test_balance: the same of the test sets.
        split_seed: seed of every draw above.
        download: download what is missing of the cleaned release (about 18 GB) into ``<root>/domainnet``.
    """

    title = "DomainNet-10"
    class_names = (
        "bird",
        "feather",
        "headphones",
        "ice_cream",
        "teapot",
        "tiger",
        "whale",
        "windmill",
        "wine_glass",
        "zebra",
    )
    domain_names = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")

    def __init__(
        self,
        root: str = "data",
        size: Size = 224,
        fit: Fit = "squash",
        split: Literal["official", "fedbn"] = "fedbn",
        balance: bool = False,
        test_balance: bool = False,
        split_seed: Seed = 0,
        download: bool = False,
    ) -> None:
        self.at = user_path(root) / "domainnet"
        self.size = size
        self.fit: Fit = fit
        self.split = split
        self.balance = balance
        self.test_balance = test_balance
        self.split_seed = split_seed
        self.download = download

    @property
    def decoding(self) -> Decoding:
        """Return how a file becomes stored pixels."""
        return Decoding(self.size, self.fit)

    def load(self) -> ImagePool:
        """Read all images; the first time from their files, then from a cache beside them."""
        listed = self.split == "official" or (self.at / "fedbn").is_dir()
        self._provide()
        files: list[str] = []
        labels, domains, sides = [], [], []
        for number, domain in enumerate(self.domain_names):
            if listed:
                mine, mine_labels, mine_test = self._listed(domain)
            else:
                folders = [[name] for name in self.class_names]
                mine, mine_labels = list_class_folders(self.at, domain, folders, others=True)
                mine_test = np.zeros(len(mine), dtype=bool)
            files += mine
            labels.append(mine_labels)
            domains.append(np.full(len(mine), number, dtype=np.int64))
            sides.append(mine_test)
        all_labels, all_domains, test = np.concatenate(labels), np.concatenate(domains), np.concatenate(sides)
        decoded = read_images(self.at, files, self.decoding.size, self.decoding.fit)
        if not listed:
            test = self._drawn(decoded, all_labels, all_domains)
        sizes = tuple(np.bincount(all_domains[test], minlength=len(self.domain_names)).tolist())
        if sizes != TEST_SIZES[self.split]:
            warnings.warn(
                f"DomainNet-10 has {', '.join(map(str, TEST_SIZES[self.split]))} test images in its domains with the "
                f"{self.split} split, {self.at} has {', '.join(map(str, sizes))}: results compare with no published "
                "number",
                stacklevel=2,
            )
        keep = test | ~np.isin(decoded.group, decoded.group[test])
        if self.balance:
            keep &= test | self._balanced(keep & ~test, all_labels, all_domains, "train")
        if self.test_balance:
            keep &= ~test | self._balanced(test, all_labels, all_domains, "test")
        return pool_of(decoded, all_labels, test, all_domains, keep)

    def _provide(self) -> None:
        """Unpack, and if allowed download, what is not there.

        Raises:
            ConfigurationError: what is missing, with its addresses.
        """
        absent = [domain for domain in self.domain_names if not (self.at / domain).is_dir()]
        zips = {domain: ARCHIVES[domain] for domain in absent if not (self.at / f"{domain}.zip").is_file()}
        lists = [name for name in LISTS if self.split == "official" and self._list_file(name) is None]
        needed = [f"{URL}/{path}" for path, _ in zips.values()] + [f"{URL}/domainnet/txt/{name}" for name in lists]
        if needed and not self.download:
            raise self.missing(
                f"DomainNet is not complete in {self.at}: download {', '.join(needed)} and put the files there "
                "as they are (zip files or unpacked as <domain>/<class>/*.jpg)"
            )
        for name in lists:
            fetch(f"{URL}/domainnet/txt/{name}", self.at / name, LISTS[name])
        for domain, (path, md5) in zips.items():
            fetch(f"{URL}/{path}", self.at / f"{domain}.zip", md5)
        for domain in absent:
            unpack_folder(
                self.at / f"{domain}.zip", domain, self.at / domain, lambda path: path.parts[1] in self.class_names
            )

    def _list_file(self, name: str) -> Path | None:
        below = ["fedbn"] if self.split == "fedbn" else [".", "splits"]
        return next((path for folder in below if (path := self.at / folder / name).is_file()), None)

    def _listed(self, domain: str) -> tuple[list[str], NDArray[np.int64], NDArray[np.bool_]]:
        """A domain's files by class and name, their labels and test flags, from its two lists."""
        rows: dict[str, tuple[int, bool]] = {}
        for name in (f"{domain}_train.txt", f"{domain}_test.txt"):
            path = self._list_file(name)
            if path is None:
                raise ConfigurationError(
                    f"{self.at / 'fedbn' / name} is missing: give <domain>_train.txt and <domain>_test.txt of every "
                    "domain there, or remove the folder for a split that is drawn"
                )
            for file, label in read_list(path, domain, self.class_names):
                if file in rows:
                    raise ConfigurationError(f"{path}: {file} is listed twice for {domain}; get the lists again")
                rows[file] = label, name.endswith("_test.txt")
        if not rows:
            raise ConfigurationError(f"the lists of {domain} in {self.at} name no image of the ten classes")
        files = sorted(rows, key=lambda file: (rows[file][0], file))
        return (
            files,
            np.array([rows[file][0] for file in files], dtype=np.int64),
            np.array([rows[file][1] for file in files], dtype=bool),
        )

    def _drawn(
        self, decoded: DecodedImages, labels: NDArray[np.int64], domains: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Test flags of an 80/20 split of each domain."""
        copies = np.isin(decoded.group, decoded.group[decoded.group != np.arange(len(labels))])
        test = np.zeros(len(labels), dtype=bool)
        for number, domain in enumerate(self.domain_names):
            rows = np.flatnonzero(domains == number)
            rng = numpy_generator(self.split_seed, "domainnet", domain)
            test[rows] = draw_test(labels[rows], ~copies[rows], rng)
        return test

    def _balanced(
        self, within: NDArray[np.bool_], labels: NDArray[np.int64], domains: NDArray[np.int64], side: str
    ) -> NDArray[np.bool_]:
        """Flags of as many images of every domain, of those in ``within``, as the smallest domain has."""
        smallest = int(np.bincount(domains[within], minlength=len(self.domain_names)).min())
        kept = np.zeros(len(labels), dtype=bool)
        for number, domain in enumerate(self.domain_names):
            rows = np.flatnonzero(within & (domains == number))
            rng = numpy_generator(self.split_seed, "domainnet", "balance", side, domain)
            kept[rows] = draw_in_proportion(labels[rows], smallest, rng)
        return kept


def read_list(path: Path, domain: str, class_names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Images of these classes in a list of lines ``<domain>/<class>/<file> <number>``, with their labels.

    The label is the place of the class in ``class_names``; the number in the file counts all of DomainNet's classes.

    Raises:
        ConfigurationError: the file cannot be read, or has other lines.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {path} ({error}); get the list again") from error
    found = []
    for line in lines:
        file = line.rpartition(" ")[0]
        parts = PurePosixPath(file).parts
        if len(parts) != 3 or parts[0] != domain or "\0" in file:
            raise ConfigurationError(
                f"{path}: expected lines of the form {domain}/<class>/<file> <number>, got {line!r}; get the list again"
            )
        if parts[1] in class_names:
            found.append((file, class_names.index(parts[1])))
    return found
