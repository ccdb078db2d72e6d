"""Finished runs' small files, copied to be committed."""

import hashlib
from pathlib import Path

from benchmark.errors import ConfigurationError
from benchmark.files import write_bytes
from benchmark.records.hashes import canonical
from benchmark.records.record_file import FILES, is_finished, parse_json
from benchmark.records.stored_run import KEPT_MANIFEST_BYTES, verify_record


def keep_record(run_dir: str | Path, destination: str | Path) -> Path:
    """Copy a finished run's small files to ``destination/<name of run_dir>``, to be committed; return that folder.

    Copied: ``config.yaml``, ``metrics.parquet``, ``manifest.json`` up to :data:`KEPT_MANIFEST_BYTES` (of a larger one
    ``partition.json`` keeps the images per client and class), and ``record.json`` last. Checkpoints and logs stay
    behind.

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
    if len(content.get("manifest.json", b"")) > KEPT_MANIFEST_BYTES:
        content["partition.json"] = _class_counts(content.pop("manifest.json"))
    if is_finished(target) and (target / "record.json").read_bytes() != content["record.json"]:
        raise ConfigurationError(f"{target} holds another record of the same name; remove it first to replace it")
    target.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        write_bytes(target / name, data)
    return target


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
