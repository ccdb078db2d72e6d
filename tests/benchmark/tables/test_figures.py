import os
import sys

import numpy as np
import pytest
from PIL import Image

from benchmark.drawing import new_figure
from benchmark.errors import ConfigurationError
from benchmark.tables.curves import Curve, learning_curves
from datamodules import heatmap
from datamodules.heatmap import _ticks, draw_counts, partition_heatmap


def draw(path, clients, classes, largest=500):
    counts = np.random.default_rng(0).integers(0, largest, (clients, classes)) * (np.arange(classes) % 3 > 0)
    partition_heatmap(counts, [f"class_{c}" for c in range(classes)], path, "a partition")
    return counts


@pytest.mark.parametrize(("clients", "classes"), [(1, 2), (5, 10), (100, 100)])
def test_a_readable_png(tmp_path, clients, classes):
    path = tmp_path / "figures" / "map.png"
    draw(path, clients, classes)
    assert os.listdir(path.parent) == ["map.png"]
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert 500 < image.width <= 2200
        assert 400 < image.height <= 1400
        assert len(image.convert("RGB").getcolors(1 << 20)) > 20  # drawn, not blank


def test_a_long_title_is_not_cut_off(tmp_path):
    title = (
        "DirichletMerged(alpha=0.3, num_clients=5, min_size=8, test_fraction=0.25, max_retries=10000), seed 1, train"
    )
    partition_heatmap(np.ones((5, 10), dtype=int), [f"class_{c}" for c in range(10)], tmp_path / "map.png", title)
    with Image.open(tmp_path / "map.png") as image:
        pixels = np.asarray(image.convert("L"))
    assert pixels[:, [0, -1]].min() == 255
    assert pixels[: len(pixels) // 10].min() < 100  # it is there


def test_an_old_figure_is_kept_when_drawing_fails(tmp_path, monkeypatch):
    path = tmp_path / "map.png"
    draw(path, 3, 4)
    before = path.read_bytes()

    def fail(*paths):
        raise OSError("disk gone")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ConfigurationError, match=r"map\.png cannot be written: disk gone"):
        draw(path, 4, 4)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["map.png"]


def test_nothing_held_and_one_class(tmp_path):
    partition_heatmap(np.zeros((2, 1), dtype=int), ["only"], tmp_path / "map.png", "empty")
    assert (tmp_path / "map.png").stat().st_size > 0


def test_shapes_must_agree(tmp_path):
    with pytest.raises(ValueError, match=r"counts must be \[clients, 3\], got \(5, 2\)"):
        partition_heatmap(np.ones((5, 2), dtype=int), ["a", "b", "c"], tmp_path / "map.png", "t")


def test_ticks_are_round_and_few():
    assert _ticks(5, 25) == [0, 1, 2, 3, 4]
    assert _ticks(50, 25) == list(range(0, 50, 2))
    assert _ticks(100, 25) == list(range(0, 100, 5))
    assert _ticks(100_000, 25)[:2] == [0, 1000]


def test_pyplot_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    draw(tmp_path / "map.png", 2, 2)
    assert "matplotlib.pyplot" not in sys.modules


def test_learning_curves_have_a_line_for_every_method(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("benchmark.tables.curves.save_figure", lambda figure, path: drawn.append(figure))
    rounds = np.arange(3)
    two_seeds = Curve("A", rounds, [np.array([0.0, 10.0, 20.0]), np.array([10.0, 20.0, 30.0])])
    learning_curves([("left", [two_seeds]), ("right", [two_seeds, Curve("B", rounds, [rounds * 1.0])])], "%", tmp_path)
    left, right = drawn[0].axes
    assert left.lines[0].get_ydata().tolist() == [5.0, 15.0, 25.0]
    band = left.collections[0].get_paths()[0].vertices[:, 1]
    spread = np.sqrt(50)  # sample standard deviation of two values ten apart
    assert band.min() == pytest.approx(5 - spread)
    assert band.max() == pytest.approx(25 + spread)
    assert [line.get_color() for line in right.lines] == ["C0", "C1"]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["A", "B"]


def test_clients_are_named_and_the_more_images_the_darker():
    figure = new_figure(5, 5)
    axes = figure.add_subplot()
    names = ["art_painting", "photo", "a name that is much longer than a column of the picture is wide"]
    draw_counts(axes, np.array([[1, 4], [2, 3], [0, 4]]), ["cat", "dog"], names)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["art painting", "photo", "a name that is much..."]
    brightness = axes.images[0].cmap([0.0, 0.5, 1.0])[:, :3].sum(axis=1)
    assert (np.diff(brightness) < 0).all()
    for clients in (["client 0", "client 1"], [f"hospital {n}" for n in range(30)]):
        axes = figure.add_subplot()
        draw_counts(axes, np.ones((len(clients), 2), dtype=int), ["cat", "dog"], clients)
        assert axes.get_xlabel() == "client"
        assert axes.get_xticklabels()[0].get_text() == "0"


def test_the_picture_of_a_partition_names_its_data_set(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(heatmap, "partition_heatmap", lambda *given: drawn.append(given))
    client = {"name": "photo", "train_classes": [1, 2]}
    manifest = {"clients": [client], "arguments": {"k": 1}, "algorithm": "A", "seed": 3, "class_names": ["x", "y"]}
    heatmap.manifest_heatmap(manifest, tmp_path / "a.png", dataset="PACS")
    heatmap.manifest_heatmap(manifest, tmp_path / "a.png")
    assert [given[3] for given in drawn] == [f"{of}A(k=1), seed 3, train images" for of in ("PACS: ", "")]
    assert drawn[0][4] == ["photo"]
