"""Finished runs' small files, copied to be committed."""

import hashlib
import math
import re
from pathlib import Path

import yaml

from benchmark.errors import ConfigurationError
from benchmark.files import json_bytes, make_folder, write_bytes
from benchmark.records.hashes import canonical, config_hash
from benchmark.records.record_file import FILES, file_entry, is_finished, parse_json
from benchmark.records.stored_run import KEPT_MANIFEST_BYTES, verify_record
from benchmark.yaml_files import parse_yaml


def keep_record(run_dir: str | Path, destination: str | Path) -> Path:
    """Copy a finished run's small files to ``destination/<name of run_dir>``, to be committed; return that folder.

    Copied: ``config.yaml``, ``metrics.parquet``, ``manifest.json`` up to :data:`KEPT_MANIFEST_BYTES` (of a larger one
    ``partition.json`` keeps the images per client and class), and ``record.json`` last. Checkpoints and logs stay
    behind, and so does the name of the folder that the images were read from, which changes no result
    (:data:`benchmark.records.hashes.RESULT_FREE_KEYS`): the copy says ``data``, also of weights that lie in it.

    Raises:
        ConfigurationError: the run is not finished or does not verify, or another record is kept under this name.
    """
    source = Path(run_dir).resolve()
    problems = verify_record(source)
    if problems:
        raise ConfigurationError(f"{run_dir} is not kept: {problems[0]}")
    target = Path(destination) / source.name
    content = {
        name: (source / name).read_bytes()
        for name in (*FILES, "partition.json", "record.json")
        if (source / name).is_file()
    }
    _forget_folder(content)
    if len(content.get("manifest.json", b"")) > KEPT_MANIFEST_BYTES:
        content["partition.json"] = _class_counts(content.pop("manifest.json"))
    if is_finished(target) and (target / "record.json").read_bytes() != content["record.json"]:
        raise ConfigurationError(f"{target} holds another record of the same name; remove it first to replace it")
    make_folder(target)
    for name, data in content.items():
        write_bytes(target / name, data)
    return target


def _forget_folder(content: dict[str, bytes]) -> None:
    """Call the folder of the images ``data``, and let the record know the changed file."""
    config = content["config.yaml"]
    roots = [f"{value.rstrip('/')}/" for _, _, key, value in _places(config) if key == b"root" and value]
    for whole, start, key, value in _places(config):
        if key == b"root":
            config = config.replace(whole, start + b" data", 1)
        elif root := next((root for root in roots if value.startswith(root)), None):
            rest = yaml.safe_dump("data/" + value.removeprefix(root), width=math.inf, allow_unicode=True)
            config = config.replace(whole, start + b" " + rest.removesuffix("...\n").strip().encode(), 1)
    if config != content["config.yaml"]:
        record = parse_json(content["record.json"])
        record["files"]["config.yaml"] = file_entry(config)
        record["config_hash"] = config_hash(parse_yaml(config.decode(), "config.yaml"))
        del record["record_sha256"]
        record["record_sha256"] = hashlib.sha256(canonical(record)).hexdigest()
        content |= {"config.yaml": config, "record.json": json_bytes(record)}


def _places(config: bytes) -> list[tuple[bytes, bytes, bytes, str]]:
    """Where folders and files of weights are named: the whole entry, what stands before its value, its key, its value.

    A long value goes on in further lines, which are indented more than the key.
    """
    found = re.finditer(rb"(?m)^(( +)(root|checkpoint_path):) .+(?:\n\2 +\S.*)*$", config)
    entries = [(match[0], match[1], match[3]) for match in found]
    values = [next(iter(yaml.safe_load(whole.decode()).values())) for whole, _, _ in entries]
    return [(*entry, "" if value is None else str(value)) for entry, value in zip(entries, values, strict=True)]


def _class_counts(manifest: bytes) -> bytes:
    """A manifest without its indices: who holds how many images of which class, and the whole manifest's sha256."""
    whole = parse_json(manifest)
    kept = {name: whole.get(name) for name in ("algorithm", "arguments", "seed", "class_names", "domain_names")}
    kept["clients"] = [
        {name: client.get(name) for name in ("name", "train_classes", "test_classes")}
        for client in whole.get("clients", [])
    ]
    kept["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    return canonical(kept) + b"\n"
