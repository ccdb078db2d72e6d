"""Every file of configs/data names a data set and a partition that fit each other; no image is read."""

from pathlib import Path

import numpy as np
import open_clip
import pytest
import timm
import yaml
from jsonargparse import ArgumentParser

from benchmark.config_files import read_layers
from benchmark.contract import LocalTraining, Stage
from benchmark.engine.round_plan import RoundPlan
from datamodules.federated import FederatedDataModule
from datamodules.transform import STATISTICS

FILES = sorted((Path(__file__).parents[2] / "configs" / "data").glob("*.yaml"))


@pytest.fixture(scope="module")
def parser():
    parser = ArgumentParser()
    parser.add_class_arguments(FederatedDataModule, "data")
    return parser


@pytest.fixture(autouse=True)
def folders_of_ones_own(tmp_path, monkeypatch):
    """What names its classes by folders finds some."""
    for name in (
        "my_images/cat",
        "my_images/dog",
        "PACS/photo/dog",
        "PACS/photo/cat",
        "PACS/sketch/dog",
        "PACS/sketch/cat",
    ):
        (tmp_path / "data" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_makes_a_datamodule(parser, path):
    text = path.read_text()
    assert text.startswith("# ")
    assert max(map(len, text.splitlines())) <= 120
    data = parser.instantiate(parser.parse_object({"data": yaml.safe_load(text)})).data
    assert len(data.client_names) == data.num_clients >= 2


@pytest.mark.parametrize(
    ("name", "images", "steps"),
    [
        ("cifar10_dir0.3_n50", 907, 56),  # PFLlib drops the last batch of 11
        ("caltech101_base_to_novel", 80, 2),  # 16 shots of 5 classes: Dassl drops the last batch of 16
        ("digits_base_to_novel", 16, 1),  # nothing else would remain
        ("office_caltech10", 766, 12),  # pFedPG says nothing, so nothing is dropped
    ],
)
def test_steps_of_an_epoch_are_the_protocols(parser, name, images, steps):
    content = yaml.safe_load((FILES[0].parent / f"{name}.yaml").read_text())
    data = parser.instantiate(parser.parse_object({"data": content})).data
    phases = [LocalTraining(lr=0.0, epochs=1).phase()]
    plan = RoundPlan([0], {0: np.arange(images)}, phases, Stage.TRAIN, data.batch_size, data.drop_last, 1, 0, 1)
    assert len(plan.steps) == steps


RUNS = [path for name in ("suites", "real") for path in sorted((FILES[0].parents[1] / name).glob("*.yaml"))]


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
