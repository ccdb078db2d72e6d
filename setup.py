"""The packages of a wheel: the repository's folders, all of them inside of ``fedprompt``."""

from pathlib import Path

from setuptools import find_packages, setup

CODE = find_packages(include=["benchmark*", "methods*", "datamodules*"], exclude=["benchmark.fedprompt"])
DATA = [".".join(folder.parts) for folder in sorted({path.parent for path in Path("configs").rglob("*.yaml")})]

setup(
    packages=["fedprompt", *(f"fedprompt.{name}" for name in [*CODE, *DATA, "results.paper"])],
    package_dir={
        "fedprompt": "benchmark/fedprompt",
        **{f"fedprompt.{folder}": folder for folder in ("benchmark", "methods", "datamodules", "configs", "results")},
    },
)
