"""Finished runs' small files, copied to be committed."""

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmark.config.yaml_files import parse_yaml
from benchmark.errors import ConfigurationError
from benchmark.files import json_bytes, make_folder, parse_json, read_regular, refuse_link, write_bytes
from benchmark.records.hashes import canonical, config_hash
from benchmark.records.predictions import CLASSES
from benchmark.records.record_file import FILES, LARGEST, file_entry, is_finished
from benchmark.records.stored_run import KEPT_MANIFEST_BYTES, StoredRun

#: Parts of the section ``data`` whose ``root`` is a folder of images; elsewhere it is an argument like any other.
_OF_IMAGES = ("source", "ood", "root")


def keep_record(run_dir: str | Path, destination: str | Path, name: str | None = None) -> Path:
    """Copy a finished run's small files to ``destination/<name>``, to be committed; return that folder.

    The name is by default that of ``run_dir``.

    Copied: ``config.yaml``, ``metrics.parquet``, ``classes.parquet``, ``manifest.json`` up to
    :data:`KEPT_MANIFEST_BYTES` (of a larger one ``partition.json`` keeps the images per client and class), and
    ``record.json`` last. Checkpoints, logs and what is said of single images (``predictions.parquet``) stay behind, and
    so does the name of the folder that the images were read from, which changes no result
    (:func:`benchmark.records.hashes.is_result_free`): the copy says ``data``, also of weights that lie in it.

    Raises:
        ConfigurationError: the run is not finished or does not verify, or another record is kept under this name.
    """
    source = Path(run_dir).resolve()
    try:
        run = StoredRun(source)
        problems = run.problems
    except ConfigurationError as error:
        problems = [str(error)]
    if problems:
        raise ConfigurationError(f"{run_dir} is not kept: {problems[0]}")
    target = Path(destination) / (name or source.name)
    refuse_link(target)
    whole = run.record.files["manifest.json"]
    names = [name for name in ("config.yaml", "metrics.parquet", CLASSES) if name in run.record.files]
    content = {name: run.content(name) for name in names if name in FILES or (source / name).exists()}
    if whole["bytes"] <= KEPT_MANIFEST_BYTES:
        content["manifest.json"] = run.content("manifest.json")
    elif run.partition is not None:
        content["partition.json"] = _class_counts(run.partition, whole["sha256"])
    content["record.json"] = read_regular(source / "record.json", LARGEST["record.json"])
    _forget_folder(content)
    if is_finished(target) and _record_of(target) != content["record.json"]:
        raise ConfigurationError(f"{target} holds another record of the same name; remove it first to replace it")
    make_folder(target)
    for name, data in content.items():
        write_bytes(target / name, data)
    return target


def _record_of(run_dir: Path) -> bytes | None:
    """The record that is kept there; None where it is no file that can be read."""
    try:
        return read_regular(run_dir / "record.json", LARGEST["record.json"])
    except OSError:
        return None


def _forget_folder(content: dict[str, bytes]) -> None:
    """Call the folder of the images ``data``, and let the record know the changed file."""
    text = content["config.yaml"].decode()
    named = [*_named(yaml.compose(text, Loader=yaml.SafeLoader))]
    folders = [node for path, node in named if path[-1] == "root" and path[0] == "data" and path[1] in _OF_IMAGES]
    spelled = {node.start_mark.index: (node, "data") for node in folders if node.value}
    roots = [f"{node.value.rstrip('/')}/" for node in folders if node.value and _is_text(node)]
    for path, node in named:
        root = next((root for root in roots if node.value.startswith(root)), None)
        if path[-1] == "checkpoint_path" and root is not None:
            value = yaml.safe_dump("data/" + node.value.removeprefix(root), width=math.inf, allow_unicode=True)
            spelled[node.start_mark.index] = node, value.removesuffix("...\n").strip()
    for start, (node, value) in sorted(spelled.items(), reverse=True):
        text = text[:start] + value + text[node.end_mark.index :]
    config = text.encode()
    if config != content["config.yaml"]:
        record = parse_json(content["record.json"])
        record["files"]["config.yaml"] = file_entry(config)
        record["config_hash"] = config_hash(parse_yaml(config.decode(), "config.yaml"))
        del record["record_sha256"]
        record["record_sha256"] = hashlib.sha256(canonical(record)).hexdigest()
        content |= {"config.yaml": config, "record.json": json_bytes(record)}


def _named(node: yaml.Node | None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], yaml.ScalarNode]]:
    """Yield keys and values of a configuration that are one scalar, with the keys that lead there."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _named(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _named(entry, path)
    elif isinstance(node, yaml.ScalarNode) and len(path) > 1:
        yield path, node


def _is_text(node: yaml.ScalarNode) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:str")


def _class_counts(whole: dict[str, Any], sha256: str) -> bytes:
    """A partition without its indices: who holds how many images of which class, and the whole manifest's sha256."""
    kept = {name: whole.get(name) for name in ("algorithm", "arguments", "seed", "class_names", "domain_names")}
    kept["clients"] = [
        {name: client.get(name) for name in ("name", "train_classes", "test_classes")} for client in whole["clients"]
    ]
    kept["manifest_sha256"] = sha256
    return canonical(kept) + b"\n"
