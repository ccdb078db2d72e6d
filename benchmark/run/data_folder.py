"""Find the data sets of a configuration that was run elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.records.classes import class_of

ROOT = "data.source.init_args.root"
#: The same of foreign images that held-out ones are held against.
STREAM_ROOT = "data.ood.source.init_args.root"


def moved(config: Mapping[str, Any], data_dir: str | Path | None) -> dict[str, str]:
    """Options that read the data set, and weights in its folder, from another folder of data sets.

    Args:
        config: of a run.
        data_dir: the folder; None leaves all where it was.

    Returns:
        Values by option; none where the images come with the code or have a folder that is theirs alone.
    """
    root, stream = (_root(part.get("source")) for part in (config["data"], config["data"].get("ood") or {}))
    if data_dir is None:
        return {}
    options = {} if stream is None else {STREAM_ROOT: str(data_dir)}
    if root is None:
        return options
    before, options[ROOT] = Path(root), str(data_dir)
    model = config["model"].get("init_args") or {} if isinstance(config["model"], dict) else {}
    for part in ("backbone", "clip"):
        arguments = model[part].get("init_args") or {} if isinstance(model.get(part), dict) else {}
        path = arguments.get("checkpoint_path")
        if path is not None and Path(path).is_relative_to(before):
            name = f"model.init_args.{part}.init_args.checkpoint_path"
            options[name] = str(Path(data_dir) / Path(path).relative_to(before))
    return options


def _root(source: Any) -> str | None:
    """Return the folder of data sets from which a source reads; None of one with a folder of its own, or without."""
    from datamodules.own_images import OwnImages  # slow to import

    given = source.get("init_args") or {} if isinstance(source, dict) else {}
    kind = class_of(source)
    of_each = [_root(each) for each in given.get("sources") or () if isinstance(each, dict)]
    root = given.get("root") or next(filter(None, of_each), None)
    return None if kind is not None and issubclass(kind, OwnImages) else root
