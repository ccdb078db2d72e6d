"""Every file of configs/data names a data set and a partition that fit each other; no image is read."""

from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from datamodules.base import FederatedDataModule

FILES = sorted((Path(__file__).parents[2] / "configs" / "data").glob("*.yaml"))


@pytest.fixture(scope="module")
def parser():
    parser = ArgumentParser()
    parser.add_class_arguments(FederatedDataModule, "data")
    return parser


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_makes_a_datamodule(parser, path):
    text = path.read_text()
    assert text.startswith("# ")
    assert max(map(len, text.splitlines())) <= 120
    data = parser.instantiate(parser.parse_object({"data": yaml.safe_load(text)})).data
    assert len(data.client_names) == data.num_clients >= 2
