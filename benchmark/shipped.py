"""Find what comes with the code from any folder: configurations, tables, the papers' numbers, and its version."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from benchmark.errors import ConfigurationError, did_you_mean
from benchmark.paths import user_path

#: The folder of ``configs`` and ``results/paper``: the repository, or the installed package.
SHIPPED = Path(__file__).resolve().parents[1]


def shipped(path: str | Path) -> Path:
    """A file by its path from the working directory, else the one of this path that came with the code, if any."""
    there = SHIPPED / path
    return there if os.path.exists(there) and not os.path.exists(path) else Path(path)  # False of an impossible name


def version() -> str:
    """The version of the installed package; in a checkout that is not installed, the one that it declares."""
    import tomllib
    from importlib import metadata

    try:
        return metadata.version("federated-prompt-benchmark")
    except metadata.PackageNotFoundError:
        return str(tomllib.loads((SHIPPED / "pyproject.toml").read_text())["project"]["version"])


def configuration(name: str) -> Path | None:
    """A configuration file by its path or its name.

    Args:
        name: a path, ``configs/suites/digits.yaml``; or what it is called in ``configs``, ``suites/digits``.

    Returns:
        Its path; None where there is none.
    """
    if not name or "\n" in name:
        return None
    paths = (shipped(entry) for entry in (name, f"configs/{name}.yaml"))
    return next((path for path in paths if os.path.isfile(path)), None)


def no_such_configuration(name: str) -> str:
    """Say that there is no configuration of this name, or file of this path, and what is like it."""
    names = list(configurations())
    is_path = name.endswith((".yaml", ".yml"))
    short = os.path.splitext(name.removeprefix("configs/"))[0] if is_path else name
    like = [known for known in names if known.rpartition("/")[2] == short] or get_close_matches(short[:100], names)
    if is_path:
        return f"{name[:300]} cannot be read: there is no such file, seen from {Path.cwd()}{did_you_mean(like)}"
    return f"there is no configuration {name[:300]!r}{did_you_mean(like)}; `benchmark configs` lists their names"


def table_file(name: str) -> Path:
    """Return the YAML file of a table.

    Args:
        name: that of ``configs/tables/<name>.yaml``, or a YAML file.

    Raises:
        ConfigurationError: there is no such file.
    """
    path = shipped(user_path(name if name.endswith((".yaml", ".yml")) else f"configs/tables/{name}.yaml"))
    if not path.is_file():
        known = sorted(entry.stem for entry in shipped("configs/tables").glob("*.yaml"))
        like = get_close_matches(path.stem[:100], known)
        raise ConfigurationError(f"there is no table {path}{did_you_mean(like)}; tables here: {', '.join(known)}")
    return path


def configurations() -> Iterator[str]:
    """Yield the names of all configurations, ``fedvpt_digits`` or ``suites/digits``: own ones, and those shipped."""
    found = {path.relative_to(root) for root in (Path("configs"), SHIPPED / "configs") for path in root.rglob("*.yaml")}
    yield from sorted(path.with_suffix("").as_posix() for path in found)
