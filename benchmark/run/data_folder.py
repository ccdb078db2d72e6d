"""Where a run's data sets are now, of a configuration that was run elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.records.classes import class_of

ROOT = "data.source.init_args.root"


def moved(config: Mapping[str, Any], data_dir: str | Path | None) -> dict[str, str]:
    """Options that read the data set, and weights in its folder, from another folder of data sets.

    Args:
        config: of a run.
        data_dir: the folder; None leaves all where it was.

    Returns:
        Values by option; none where the images come with the code or have a folder that is theirs alone.
    """
    from datamodules.own_images import OwnImages  # slow to import

    source = config["data"]["source"]
    given = source.get("init_args") or {} if isinstance(source, dict) else {}
    kind = class_of(source)
    if data_dir is None or "root" not in given or (kind is not None and issubclass(kind, OwnImages)):
        return {}
    before, options = Path(given["root"]), {ROOT: str(data_dir)}
    model = config["model"].get("init_args") or {} if isinstance(config["model"], dict) else {}
    for part in ("backbone", "clip"):
        arguments = model[part].get("init_args") or {} if isinstance(model.get(part), dict) else {}
        path = arguments.get("checkpoint_path")
        if path is not None and Path(path).is_relative_to(before):
            name = f"model.init_args.{part}.init_args.checkpoint_path"
            options[name] = str(Path(data_dir) / Path(path).relative_to(before))
    return options
