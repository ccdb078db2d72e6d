"""``benchmark init``: look at a folder of images, and write the configuration of a first run on them."""

import argparse
import shlex
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import methods
from benchmark.config.yaml_files import Quoted, dump_yaml
from benchmark.errors import ConfigurationError
from benchmark.files import replacing
from benchmark.shipped import configurations
from datamodules.folders import file_statuses
from datamodules.own_folders import SIDE_NAMES, Listed, folders_in
from datamodules.own_images import DomainFolders, ImageFolders, ImageIndex, OwnImages

#: Images that a client should have to train on and to be tested on, where those of one folder are dealt to clients.
IMAGES_A_CLIENT = (80, 20)
MOST_CLIENTS = 10
#: Methods that learn prompts of a text, for which a CLIP is needed.
TEXT_METHODS = frozenset(
    name.lower() for name in methods.__all__ if "class_names" in signature(getattr(methods, name)).parameters
)


def init(arguments: argparse.Namespace) -> int:
    """Look at a folder of images, and write the configuration of a first run on them."""
    folder, out = arguments.folder, arguments.out
    known = [name.removeprefix("methods/") for name in configurations() if name.startswith("methods/")]
    if arguments.method not in known:
        raise ConfigurationError(f"there is no method {arguments.method!r}; expected one of {', '.join(known)}")
    if out.exists():
        raise ConfigurationError(f"{out} is there already; give another file with --out, or remove it")
    kind, options = kind_of(folder)
    name = arguments.name or folder.resolve().name
    source = kind(name=name, root=str(folder), **options)
    content, said = configuration(source, str(folder), options, arguments.method)
    with replacing(out) as stream:
        stream.write(f"# {said}\n{content}".encode())
    print(f"{folder}: {said}")
    print(f"written: {out}")
    file = shlex.quote(str(out))
    print(f"  lightning-cli fit --config {file} --trainer.max_epochs 3  # a first run, with a small backbone")
    print(f"  benchmark partition {file} partition.png                  # who would hold which classes")
    return 0


def kind_of(folder: Path) -> tuple[Callable[..., OwnImages], dict[str, Any]]:
    """Return what reads the images of a folder as they lie there, and its further arguments.

    Raises:
        ConfigurationError: there is no such folder, or there are neither an index nor folders in it.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {folder}; give the one that holds the images")
    for index in ("index.csv", "index.parquet"):
        if (folder / index).is_file():
            return ImageIndex, {"index": index} if index != "index.csv" else {}
    names = folders_in(folder)
    if not names:
        raise ConfigurationError(
            f"{folder} holds no folders; put the images of each class into a folder of the class's name, or write "
            "index.csv with columns path and label (and domain, split, group)"
        )
    if all(name.lower() in SIDE_NAMES for name in names):
        return ImageFolders, {}
    deeper = [name for name in names if folders_in(folder / name)]
    if deeper and len(deeper) < len(names):
        flat = next(name for name in names if name not in deeper)
        raise ConfigurationError(
            f"{folder} mixes folders of classes and of domains: {deeper[0]} holds folders, {flat} does not; expected "
            "<class>/* or <domain>/<class>/* throughout"
        )
    return (DomainFolders if deeper else ImageFolders), {}


def configuration(source: OwnImages, root: str, options: dict[str, Any], method: str) -> tuple[str, str]:
    """Return the configuration of a run on these images, and what they are, in a line.

    Raises:
        ConfigurationError: a file is missing, or there are too few images for the clients.
    """
    images = source.listing()
    file_statuses(source.at, images.files)  # all of them are there
    counts = np.bincount(images.labels, minlength=len(source.class_names))
    least = int(counts.argmin())
    several = len(source.domain_names) > 1
    trained, tested = _sides(images, len(source.domain_names))
    if several:
        held, fewest = trained + tested, np.minimum(trained, tested)
        if fewest.min() < 1:
            name = source.domain_names[int(fewest.argmin())]
            count = int(held[fewest.argmin()])
            has = f"{count} images, all on one side of the split" if count > 1 else "1 image"
            raise ConfigurationError(
                f"{root}: domain {name!r} has {has}, and a client needs one to train on and one to be tested on; add "
                "some, or leave the domain out"
            )
        partition: Any = "datamodules.partition.DomainPerClient"
        dealt = f"{len(source.domain_names)} domains, one a client"
    else:
        train, test = int(trained.sum()), int(tested.sum())
        enough = min(number // each for number, each in zip((train, test), IMAGES_A_CLIENT, strict=True))
        clients = max(2, min(MOST_CLIENTS, enough))
        if min(train, test) < clients:
            there, needed = f"{len(images.files)} images", f"{5 * clients} at least"  # a fifth is for tests
            if images.given.any():
                there = f"{train} training and {test} test images"
                needed = f"{clients} of each at least, or leave the sides out, and a fifth is drawn for tests"
            raise ConfigurationError(
                f"{root}: {there} are too few for {clients} clients, of which each trains on some and is tested on "
                f"others; add some, {needed}"
            )
        least_of_a_client = max(1, min(10, min(train, test) // (2 * clients)))  # half of what each has on average
        given = {"alpha": 0.5, "num_clients": clients, "min_size": least_of_a_client}
        partition = {"class_path": "datamodules.partition.DirichletShared", "init_args": given}
        dealt = f"dealt to {clients} clients by Dirichlet(0.5)"
    kind = type(source)
    data = {
        "source": {
            "class_path": f"{kind.__module__}.{kind.__name__}",
            "init_args": {"name": Quoted(source.name), "root": Quoted(root), **options},
        },
        "partition": partition,
    }
    # Their small backbones come along; what else they say of a run suits a machine without a GPU.
    suite = "digits_clip" if method in TEXT_METHODS else "digits"
    whole = {"base": [f"methods/{method}", f"suites/{suite}"], "data": data}
    content = dump_yaml(whole, sort_keys=False, default_flow_style=None)
    said = (
        f"{len(images.files):,} images of {len(source.class_names)} classes (fewest: {counts[least]} of "
        f"{source.class_names[least]}), {dealt}"
    )
    return content, said


def _sides(images: Listed, domains: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how many images of each domain train and how many are tested: those given, of others a fifth is drawn."""
    drawn, tested, given = (
        np.bincount(images.domains[which], minlength=domains)
        for which in (~images.given, images.given & images.test, images.given)
    )
    fifth = np.where(drawn > 1, np.maximum(drawn // 5, 1), 0)
    return given - tested + drawn - fifth, tested + fifth
