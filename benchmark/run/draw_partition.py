"""A partition as a picture, classes x clients, and its manifest beside it."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmark.errors import ConfigurationError
from benchmark.paths import user_path
from benchmark.records.record_file import is_finished, read_record
from benchmark.records.stored_run import stored_run
from benchmark.run.reload import configured_data, data_of_run
from benchmark.shipped import configuration
from datamodules.heatmap import manifest_heatmap
from datamodules.manifest import read_manifest, write_manifest


def draw_partition(what: Sequence[str], picture: Path, split: str, overrides: Sequence[str]) -> list[Path]:
    """Draw a manifest, or the partition of a source's images as configurations have it; return the files written.

    Args:
        what: a ``manifest.json``, or configurations, of which later ones win: of data alone, or of whole runs.
        picture: a PNG; the manifest of configurations is written beside it, under its name.
        split: whose images are counted.
        overrides: of the data, ``key=value``.

    Raises:
        ConfigurationError: there is no such manifest or configuration, the name is no PNG's, or the manifest would be
            written over another file or into a finished run's folder.
    """
    if picture.suffix != ".png":
        raise ConfigurationError(f"the picture is a PNG: give a name that ends in .png, not {picture}")
    first = Path(what[0])
    if first.suffix == ".json" and len(what) == 1:
        dataset = None
        if first.name == "manifest.json" and is_finished(first.parent):
            stored_run(first.parent).content("manifest.json")  # refuses another than the run wrote
            dataset = read_record(first.parent).dataset
        manifest_heatmap(read_manifest(first), picture, split, dataset)
        return [picture]
    beside = picture.with_suffix(".json")
    if is_finished(beside.parent) or (beside.exists() and not _is_manifest(beside)):
        raise ConfigurationError(
            f"the manifest would be written to {beside}, over another file or into a finished run's folder; give the "
            "picture another name"
        )
    paths = [configuration(name) or user_path(name) for name in what]
    of_runs = [_is_of_a_run(path) for path in paths]
    if any(of_runs):
        options = [f"--{'config' if whole else 'data'}={path}" for path, whole in zip(paths, of_runs, strict=True)]
        options += [f"--data.{override}" for override in overrides]
        data = data_of_run(options)
    else:
        data = configured_data(paths, overrides)
    manifest = data.manifest
    write_manifest(beside, manifest)
    manifest_heatmap(manifest, picture, split, data.source.recorded_name)
    return [picture, beside]


def _is_of_a_run(path: Path) -> bool:
    """Return whether a configuration file is one of a whole run: it has ``base``, ``model`` or ``data``."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return False  # whoever reads it next says why
    return isinstance(content, dict) and not content.keys().isdisjoint({"base", "model", "data"})


def _is_manifest(path: Path) -> bool:
    try:
        read_manifest(path)
    except ConfigurationError:
        return False
    return True
