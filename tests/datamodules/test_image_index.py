"""Rows, sides and groups of an index of the user's own images."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmark.errors import ConfigurationError
from datamodules.own_folders import Listed
from datamodules.own_images import ImageIndex


def write_index(root: Path, header: str, rows: Sequence[str], images: int = 4) -> Path:
    """Images ``a/<n>.png``, of which each has its shade of grey, and an index of these rows."""
    (root / "a").mkdir()
    for number in range(images):
        Image.new("L", (4, 4), number).save(root / f"a/{number}.png")
    (root / "index.csv").write_text("\n".join([header, *rows]) + "\n")
    return root


def quoted(number: int) -> str:
    """Return a row of an index, of which the third and the 18th have a quote too many."""
    stray = '"' if number in (2, 17) else ""
    return f"a/{number}.png,{'xy'[number % 2]},{stray}p{number}"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["a/0.png,x, the first,p", "a/1.png,y,q"], r"line 2 has more cells than .* \(surplus: p\); put quotes around"),
        ([*map(quoted, range(17)), 'a/17.png,y,p17"'], r"line 19 ends a row whose group has several lines"),
        ([*map(quoted, range(20))], r"index\.csv: from line 4 on: '.' expected after .*; is a quote there without"),
        ([*map(quoted, range(16))], r"index\.csv: from line 4 on: unexpected end of data; is a quote there without"),
        (["a/0.png,x,p", "", "a/1.png,y"], r"line 4 is too short; give it a cell for each column"),
    ],
)
def test_rows_with_other_cells_than_the_header_are_refused(rows: list[str], said: str, tmp_path: Path) -> None:
    root = write_index(tmp_path, "path,label,group", rows)
    with pytest.raises(ConfigurationError, match=said) as refused:
        ImageIndex("Pets", str(root), size=4)
    assert "\n" not in str(refused.value)


def test_a_row_is_called_by_the_line_in_which_it_stands(tmp_path: Path) -> None:
    """Count empty lines, and those of cells with several, as an editor does."""
    root = write_index(tmp_path, "path,label,notes", ["", 'a/0.png,x,"a note', 'on two lines"', "", "a/1.png,,none"])
    with pytest.raises(ConfigurationError, match=r"index\.csv: row 6 has an empty label; fill it in"):
        ImageIndex("Pets", str(root), size=4)
    (root / "index.csv").write_text("path,label\n\na/0.png,x\n\n\na/0.png,y\n")
    with pytest.raises(ConfigurationError, match=r"row 6 names a/0\.png, as row 3 does; keep one of them"):
        ImageIndex("Pets", str(root), size=4)


def test_a_column_that_is_not_read_may_have_several_lines(tmp_path: Path) -> None:
    rows = [f'a/{n}.png,{"xy"[n % 2]},"a note\non two lines"' for n in range(4)]
    assert len(ImageIndex("Pets", str(write_index(tmp_path, "path,label,notes", rows)), size=4).rows) == 4


def test_a_group_with_and_without_a_point_is_one(tmp_path: Path) -> None:
    rows = [f"a/{n}.png,x,{group},train" for n, group in enumerate(["17", "", "17.0"])]
    root = write_index(tmp_path, "path,label,group,split", [*rows, "a/3.png,y,3,test"])
    listed = ImageIndex("Pets", str(root), size=4)
    assert [row["group"] for row in listed.rows] == ["17", "", "17", "3"]
    (root / "index.csv").write_text((root / "index.csv").read_text().replace("17.0,train", "17.0,test"))
    with pytest.raises(ConfigurationError, match="the group '17' is on both sides"):
        ImageIndex("Pets", str(root), size=4)


def test_a_copy_of_a_test_image_takes_no_other_image_of_its_patient(tmp_path: Path) -> None:
    rows = [f"a/{n}.png,{'xy'[n % 2]},{'AB'[n > 7]},{('train', 'test')[n > 7]}" for n in range(12)]
    root = write_index(tmp_path, "path,label,group,split", rows, images=12)
    (root / "a/3.png").write_bytes((root / "a/9.png").read_bytes())
    with pytest.warns(UserWarning, match="Pets: 1 training images are copies of test images and do not tr") as said:
        pool = ImageIndex("Pets", str(root), size=4).load()
    assert len(said) == 1
    assert sorted(pool.images[~pool.test][:, 0, 0, 0].tolist()) == [0, 1, 2, 4, 5, 6, 7]
    assert len(pool.group.unique()) == 2


class OnBothSides(ImageIndex):
    """An index that gives the first image of a group as a test image."""

    def listing(self) -> Listed:
        made = super().listing()
        return replace(made, test=np.arange(len(made.files)) == 0, given=np.ones(len(made.files), dtype=bool))


def test_a_group_that_a_source_gives_on_both_sides_is_tested_alone(tmp_path: Path) -> None:
    rows = [f"a/{n}.png,{'xy'[n % 2]},{n // 4}" for n in range(8)]
    root = write_index(tmp_path, "path,label,group", rows, images=8)
    with pytest.warns(UserWarning, match="Pets: 3 training images are of a group with test images and do not train"):
        pool = OnBothSides("Pets", str(root), size=4).load()
    assert pool.test.sum() == 1
    assert sorted(pool.images[~pool.test][:, 0, 0, 0].tolist()) == [4, 5, 6, 7]
