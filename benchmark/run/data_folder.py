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

    One's own images have a folder that is theirs alone. It is the one of its name in ``data_dir``; else, where it is
    not there any more, ``data_dir`` itself.

    Args:
        config: of a run.
        data_dir: the folder; None leaves all where it was.

    Returns:
        Values by option; none where the images come with the code or are where they were.
    """
    source = config["data"].get("source")
    root, stream = (_root(of) for of in (source, (config["data"].get("ood") or {}).get("source")))
    if data_dir is None:
        return {}
    options = {} if stream is None else {STREAM_ROOT: str(data_dir)}
    if root is None:
        if _is_own(source) and (found := _own_folder(source, Path(data_dir))) is not None:
            options[ROOT] = str(found)
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


def _is_own(source: Any) -> bool:
    """Return whether a source reads one's own images."""
    from datamodules.own_images import OwnImages  # slow to import

    kind = class_of(source)
    return kind is not None and issubclass(kind, OwnImages)


def _own_folder(source: Any, data_dir: Path) -> Path | None:
    """Return where one's own images are now; None where they were, or nowhere."""
    before = Path((source.get("init_args") or {}).get("root") or "")
    if before.name and (data_dir / before.name).is_dir():
        return data_dir / before.name
    return data_dir if data_dir.is_dir() and not before.is_dir() else None


def _root(source: Any) -> str | None:
    """Return the folder of data sets from which a source reads; None of one with a folder of its own, or without."""
    given = source.get("init_args") or {} if isinstance(source, dict) else {}
    of_each = [_root(each) for each in given.get("sources") or () if isinstance(each, dict)]
    root = given.get("root") or next(filter(None, of_each), None)
    return None if _is_own(source) else root
