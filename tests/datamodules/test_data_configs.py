"""Files of configs/sources and configs/partitions that are used together fit each other; no image is read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import open_clip
import pytest
import timm
from federation import terms
from jsonargparse import ArgumentParser

from benchmark.config.files import read_layers
from benchmark.config.yaml_files import read_mapping
from benchmark.contract import LocalTraining, Stage
from benchmark.engine.plan.round_plan import RoundPlan
from datamodules.federated import FederatedDataModule
from datamodules.transform import STATISTICS

CONFIGS = Path(__file__).parents[2] / "configs"
OWN = [
    ("sources/own_folders", "partitions/dirichlet_shared"),
    ("sources/own_folders", "partitions/quantity_skew"),
    ("sources/pacs", "partitions/domain_per_client"),
    ("sources/pacs_fixed", "partitions/domain_per_client"),
    ("sources/office_home", "partitions/domain_per_client"),
    ("sources/fed_isic2019", "partitions/domain_per_client"),
    ("sources/camelyon17", "partitions/domain_per_client"),
    ("sources/sun397", "partitions/base_to_novel"),
    ("sources/fgvc_aircraft", "partitions/base_to_novel"),
    ("sources/imagenet", "partitions/base_to_novel"),
    ("sources/imagenet_and_variants", "partitions/imagenet_to_variants"),
    ("sources/medmnist", "partitions/dirichlet_shared"),
    ("sources/vlcs", "partitions/domain_per_client"),
    ("sources/letters", "partitions/domain_per_client"),
]


def in_tables() -> set[tuple[str, ...]]:
    """Sources and partitions that tables and figures name together."""
    tables = map(read_mapping, [*CONFIGS.glob("tables/*.yaml"), *CONFIGS.glob("figures/*.yaml")])
    groups = [group for table in tables for preset in table["presets"].values() for group in preset["data"]]
    return {tuple(group["data"]) for group in groups if "data" in group}


SUITES = sorted(CONFIGS.glob("suites/*.yaml"))
TOGETHER = sorted({*OWN, *in_tables()})


@pytest.fixture(scope="module")
def parser():
    parser = ArgumentParser()
    parser.add_class_arguments(FederatedDataModule, "data")
    return parser


@pytest.fixture(autouse=True)
def folders_of_ones_own(tmp_path, monkeypatch):
    """Make image folders and a list of class names, for sources that read their class names from files."""
    for name in (
        "my_images/cat",
        "my_images/dog",
        "PACS/photo/dog",
        "PACS/photo/cat",
        "PACS/sketch/dog",
        "PACS/sketch/cat",
    ):
        (tmp_path / "data" / name).mkdir(parents=True)
    names = [f"n{number:08} class {number}" for number in range(1000)]
    (tmp_path / "data/imagenet").mkdir()
    (tmp_path / "data/imagenet/classnames.txt").write_text("\n".join(names))
    for name in (
        "imagenetv2/imagenetv2-matched-frequency-format-val/0",
        "imagenet-sketch/images/n00000000",
        "imagenet-adversarial/imagenet-a/n00000000",
        "imagenet-adversarial/imagenet-a/n00000001",
        "imagenet-rendition/imagenet-r/n00000000",
        "imagenet-rendition/imagenet-r/n00000001",
    ):
        (tmp_path / "data" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def made(parser, *names):
    """The datamodule of a source's file and a partition's, or of a suite's data."""
    content = {}
    for name in names:
        (layer,) = read_layers([CONFIGS / f"{name}.yaml"])
        content |= layer.options.get("data", layer.options)
    return parser.instantiate(parser.parse_object({"data": content})).data


@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_makes_a_datamodule(parser, names):
    few_shot = ["suites/pets_clip_few_shot"] if len(names) == 1 else []
    data = made(parser, *few_shot, *names)
    assert len(data.client_names) == data.num_clients >= 2


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_suite_makes_a_datamodule(parser, path):
    data = made(parser, f"suites/{path.stem}")
    assert len(data.client_names) == data.num_clients >= 2


def test_each_file_is_used_and_says_who_or_how():
    there = {path.relative_to(CONFIGS) for name in ("sources", "partitions") for path in CONFIGS.glob(f"{name}/*.yaml")}
    named = {f"{name}.yaml" for names in TOGETHER for name in names}
    named |= {entry.removeprefix("../") for path in SUITES for entry in read_mapping(path)["data"][:2]}
    assert set(map(Path, named)) == there
    for path in there:
        text = (CONFIGS / path).read_text()
        assert text.startswith("# ")
        assert max(map(len, text.splitlines())) <= 120
        keys = set(read_mapping(CONFIGS / path))
        if path.parent.name == "sources":
            assert keys == {"source"}
        else:
            assert "partition" in keys
            assert not keys & {"source", "transform"}


@pytest.mark.parametrize(
    ("names", "images", "steps"),
    [
        (["sources/cifar10", "partitions/dirichlet_merged"], 907, 56),  # PFLlib drops the last batch of 11
        (["sources/caltech101", "partitions/base_to_novel"], 80, 2),  # 5 classes: Dassl drops the last batch of 16
        (["suites/digits_clip"], 16, 1),  # nothing else would remain
        (["sources/office_caltech10", "partitions/domain_per_client"], 766, 12),  # pFedPG says nothing, so none is
    ],
)
def test_steps_of_an_epoch_are_the_protocols(parser, names, images, steps):
    data = made(parser, *names)
    phases = [LocalTraining(lr=0.0, epochs=1).phase()]
    own = replace(terms(1, batch_size=data.batch_size, row=data.batch_size), drop_last=data.drop_last)
    plan = RoundPlan([0], {0: np.arange(images)}, own, phases, Stage.TRAIN, 1, 1)
    assert len(plan.steps) == steps


RUNS = [*SUITES, *sorted(CONFIGS.glob("real/*.yaml"))]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_images_are_normalised_as_the_backbones_weights_were(path):
    (layer,) = read_layers([path])
    method = layer.options["model"]["init_args"]
    transform = layer.options["data"].get("transform") or {}
    backbone = method.get("backbone") or method["clip"]
    if isinstance(backbone, str):  # the embedded CLIP, and networks from scratch
        assert transform.get("normalize", "half") == "half"
        return
    arguments = backbone["init_args"]
    name = arguments["name"]
    if name in open_clip.list_models():
        trained = open_clip.get_pretrained_cfg(name, arguments["pretrained_tag"])
    else:
        trained = (
            {"mean": [0.5] * 3, "std": [0.5] * 3} if name == "micro_vit" else timm.get_pretrained_cfg(name).to_dict()
        )
    assert STATISTICS[transform.get("normalize", "half")] == (tuple(trained["mean"]), tuple(trained["std"]))
