"""YAML files are read safely, within limits, and refused by name."""

import time
from pathlib import Path

import pytest
import yaml

from benchmark.config.parser import load
from benchmark.config.yaml_files import DEEPEST, dump_yaml, read_mapping, read_yaml
from benchmark.errors import ConfigurationError

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
REFUSED = {
    "a folder": (None, "it is a folder; expected a YAML file"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0", "it is no text in UTF-8 (byte 0); expected a YAML file"),
    "UTF-16": ("a: 1".encode("utf-16"), "it is no text in UTF-8 (byte 0)"),
    "Latin-1": ("a: ü".encode("latin-1"), "it is no text in UTF-8 (byte 3)"),
    "a tab": (b"a:\n\tb: 1\n", "line 2, column 1 cannot be read as YAML: "),
    "an open bracket": (b"a: [1, 2\nb: 3\n", "cannot be read as YAML: "),
    "a tag of Python": (
        b"a: !!python/object/apply:os.system [ls]\n",
        "line 1, column 4 cannot be read as YAML: could not determine a constructor for the tag",
    ),
    "an undefined alias": (b"a: *b\n", "found undefined alias"),
    "a date that is none": (b"a: 2026-02-30\n", "cannot be read as YAML: day is out of range"),
    "two documents": (b"a: 1\n---\nb: 1\n", "expected a single document"),
    "a key twice": (b"a: 1\nb: 2\na: 3\n", "line 3: the key 'a' stands there twice; keep one of them"),
    "an inner key twice": (b"m: {lr: 1, epochs: 2, lr: 3}\n", "line 1: the key 'lr' stands there twice"),
    "deep": (b"[" * 10_000, f"line 1: more than {DEEPEST} mappings and lists inside each other"),
    "deep blocks": (
        "\n".join(f"{'  ' * d}a:" for d in range(500)).encode(),
        f"more than {DEEPEST} mappings and lists inside each other",
    ),
    "a bomb": (BOMB.encode(), "line 4: aliases stand for more than 10,000 values; write the values out, or fewer"),
    "a cycle": (b"a: &a\n  b: *a\n", "line 2: the alias *a lies in what it stands for"),
    "a cycle of lists": (b"a: &a [1, [*a]]\n", "the alias *a lies in what it stands for"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_cannot_be_taken_is_refused_by_name_and_soon(case: str, tmp_path: Path) -> None:
    content, words = REFUSED[case]
    path = tmp_path / "my.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    began = time.perf_counter()
    with pytest.raises(ConfigurationError) as refused:
        read_yaml(path)
    assert time.perf_counter() - began < 1
    assert str(refused.value).startswith(str(path))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigurationError, match=f"gone.yaml cannot be read: there is no such file, seen from {tmp_path}"
    ):
        read_yaml("gone.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read: File name too long"):
        read_yaml("a" * 300 + ".yaml")
    with pytest.raises(ConfigurationError, match="cannot be read: embedded null byte"):
        read_yaml("a\0.yaml")


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", "nothing"), ("# only words\n", "nothing"), ("{}", "nothing"), ("- 1", "a list"), ("a", "a single value")],
)
def test_a_mapping_is_expected_where_a_configuration_is_read(text: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"my.yaml holds {kind}; expected configuration keys"):
        read_mapping(path)


def test_what_is_legal_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    text = "a: &a {lr: 1e-3, clip: null}\nb: {<<: *a, lr: 0.1}\nc: [*a, {lr: 2}]\n1: on\n'ü': 2026-01-02\nd: {}\n"
    path = tmp_path / "my.yaml"
    path.write_text(text)
    assert read_mapping(path) == yaml.safe_load(text)
    path.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert read_yaml(path) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parents[3].glob("configs/**/*.yaml")), ids=lambda path: path.stem
)
def test_every_configuration_is_read_as_the_library_reads_it(path: Path) -> None:
    assert read_mapping(path) == yaml.safe_load(path.read_text())


def test_a_text_in_quotes_stays_one_though_it_looks_like_a_number(tmp_path: Path) -> None:
    """Read and write texts as the parser of options reads them: only there ``1e3`` is a number."""
    (tmp_path / "it.yaml").write_text("""{a: '1e3', b: "1.5e3", c: 1e3, d: 'text', 'e': 2}""")
    found = read_mapping(tmp_path / "it.yaml")
    assert found == {"a": "1e3", "b": "1.5e3", "c": "1e3", "d": "text", "e": 2}
    assert load(yaml.safe_dump(found)) == {"a": "1e3", "b": "1.5e3", "c": 1000.0, "d": "text", "e": 2}
    content = {"name": "1e3", "number": 1e-6, "word": "e3"}
    assert load(dump_yaml(content)) == content
