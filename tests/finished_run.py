"""Directories of finished runs whose files fit each other, without training anything."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from benchmark.files import write_bytes, write_json, write_text
from benchmark.records.hashes import manifest_hash
from benchmark.records.predictions import PREDICTIONS, parquet_of
from benchmark.records.record import RunRecord
from benchmark.records.record_file import write_record


def write_finished_run(
    folder: Path,
    record: RunRecord,
    metrics: pd.DataFrame,
    config: str | None = None,
    predictions: pd.DataFrame | None = None,
    **manifest: Any,
) -> RunRecord:
    """Write configuration, manifest, metrics and record; return the record.

    Args:
        folder: is made.
        record: its ``manifest_hash`` is replaced by that of the manifest.
        metrics: columns of :data:`benchmark.records.metrics_table.COLUMNS`.
        config: YAML; by default what the record says.
        predictions: kept images, columns of :data:`benchmark.records.predictions.COLUMNS`; None for a run without.
        manifest: further fields, or instead of those made of the record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = (
        f"seed_everything: {record.seed}\ntrainer: {{max_epochs: {record.rounds}}}\n"
        f"model: {{class_path: methods.{record.method}}}\n"
        f"data: {{source: {{class_path: datamodules.{record.dataset}}}}}\n"
    )
    write_text(folder / "config.yaml", said if config is None else config)
    clients = [
        {"name": name, "train_classes": [3], "test_classes": [size]}
        for name, size in zip(record.client_names, record.test_sizes, strict=True)
    ]
    content = {"algorithm": "ByHand", "arguments": {}, "seed": 0, "class_names": ["mug"], "clients": clients} | manifest
    write_json(folder / "manifest.json", content)
    if predictions is not None:
        write_bytes(folder / PREDICTIONS, parquet_of(predictions))
    whole = replace(record, manifest_hash=manifest_hash(content))
    return write_record(folder, whole, metrics, predictions=predictions is not None)
