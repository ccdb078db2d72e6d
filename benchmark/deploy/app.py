"""Write a Flower app: two short files that work for every method, and what server and clients have agreed on."""

import tempfile
from importlib.metadata import version as installed
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.errors import ConfigurationError
from benchmark.files import make_folder, write_bytes, write_text
from benchmark.shipped import version

if TYPE_CHECKING:  # slow to import
    from benchmark.deploy.agreement import Agreement

PACKAGE = "federated_app"
_PART = '''"""The {part} of this federation; what it does stands in the agreement of pyproject.toml."""

from fedprompt.benchmark.deploy.flower import {part}_app

app = {part}_app()
'''
_LICENSE = """The files of this folder were written by `benchmark deploy app`.
They are under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""


def check_flower() -> None:
    """Refuse to go on without Flower.

    Raises:
        ConfigurationError: it is not installed.
    """
    if find_spec("flwr") is None:
        raise ConfigurationError("a deployment needs Flower, which is not installed: pip install '.[flower]'")


def write_app(agreement: "Agreement", folder: Path) -> None:
    """Write the app into a new folder, which is there whole or not at all.

    Args:
        agreement: of the deployment.
        folder: of the app.

    Raises:
        ConfigurationError: the folder is there.
    """
    check_folder(folder)
    import tomli_w

    method = str(agreement.config["model"]["class_path"]).rsplit(".", 1)[-1]
    flower = installed("flwr")
    project = {
        "project": {
            "name": f"federated-{method.lower()}",
            "version": "1.0.0",
            "description": f"{method} for {len(agreement.client_names)} clients, {agreement.terms.rounds} rounds",
            "license": {"file": "LICENSE"},
            "dependencies": [f"flwr>={flower}", f"federated-prompt-benchmark[flower]=={version()}"],
        },
        "tool": {
            "flwr": {
                "app": {
                    "publisher": "federation",
                    "fab-format-version": 1,
                    "flwr-version-target": flower,
                    "components": {
                        "serverapp": f"{PACKAGE}.server_app:app",
                        "clientapp": f"{PACKAGE}.client_app:app",
                    },
                    "config": {
                        "agreement": agreement.text(),
                        "state": "",
                        "run": "",
                        "split": "",
                        "timeout": 3600.0,
                        "wait": 600.0,
                        "min-clients": 1,
                    },
                }
            }
        },
    }
    make_folder(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    inside = make_folder(building / PACKAGE)
    write_text(inside / "__init__.py", "")
    for part in ("server", "client"):
        write_text(inside / f"{part}_app.py", _PART.format(part=part))
    write_text(building / "LICENSE", _LICENSE)
    write_bytes(building / "pyproject.toml", tomli_w.dumps(project).encode())
    building.rename(folder)


def check_folder(folder: Path) -> None:
    """Refuse a folder that is there.

    Raises:
        ConfigurationError: it is.
    """
    if folder.exists() or folder.is_symlink():
        raise ConfigurationError(f"{folder} exists; name a new folder for the app, or remove this one first")
