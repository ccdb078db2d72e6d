"""Finished runs' small files, copied to be committed."""

import hashlib
import math
import re
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

#: Where folders and files of weights are named: the entry, and in it what stands before its value and its key. A long
#: value goes on in further lines, which are indented more than the key.
_PLACE = re.compile(rb"(?m)^(( +)(root|checkpoint_path):) .+(?:\n\2 +\S.*)*$")


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
    config = content["config.yaml"]
    roots = [
        f"{named.rstrip('/')}/" for entry in _PLACE.finditer(config) if entry[3] == b"root" and (named := _value(entry))
    ]

    def renamed(entry: re.Match[bytes]) -> bytes:
        named = _value(entry)
        if entry[3] == b"root":
            return entry[1] + b" data"
        root = next((root for root in roots if named.startswith(root)), None)
        if root is None:
            return entry[0]
        spelled = yaml.safe_dump("data/" + named.removeprefix(root), width=math.inf, allow_unicode=True)
        return entry[1] + b" " + spelled.removesuffix("...\n").strip().encode()

    config = _PLACE.sub(renamed, config)
    if config != content["config.yaml"]:
        record = parse_json(content["record.json"])
        record["files"]["config.yaml"] = file_entry(config)
        record["config_hash"] = config_hash(parse_yaml(config.decode(), "config.yaml"))
        del record["record_sha256"]
        record["record_sha256"] = hashlib.sha256(canonical(record)).hexdigest()
        content |= {"config.yaml": config, "record.json": json_bytes(record)}


def _value(entry: re.Match[bytes]) -> str:
    """The value of an entry of a configuration; empty for null."""
    return str(next(iter(yaml.safe_load(entry[0].decode()).values())) or "")


def _class_counts(whole: dict[str, Any], sha256: str) -> bytes:
    """A partition without its indices: who holds how many images of which class, and the whole manifest's sha256."""
    kept = {name: whole.get(name) for name in ("algorithm", "arguments", "seed", "class_names", "domain_names")}
    kept["clients"] = [
        {name: client.get(name) for name in ("name", "train_classes", "test_classes")} for client in whole["clients"]
    ]
    kept["manifest_sha256"] = sha256
    return canonical(kept) + b"\n"
