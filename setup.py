"""The packages of a wheel: the repository's folders, all of them inside of ``fedprompt``."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

CODE = find_packages(
    include=["benchmark*", "methods*", "datamodules*"], exclude=["benchmark.fedprompt", "benchmark.speed.*"]
)
DATA = [".".join(folder.parts) for folder in sorted({path.parent for path in Path("configs").rglob("*.yaml")})]
#: What a configuration names; the measurements themselves are of a checkout.
OF_SPEED = ("__init__", "simple_cnn")


class BuildPackages(build_py):
    """Leaves out how speed is measured."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return package, name and file of each module."""
        found = super().find_package_modules(package, package_dir)
        return [each for each in found if package != "fedprompt.benchmark.speed" or each[1] in OF_SPEED]


setup(
    packages=["fedprompt", *(f"fedprompt.{name}" for name in [*CODE, *DATA, "results.paper"])],
    package_dir={
        "fedprompt": "benchmark/fedprompt",
        **{f"fedprompt.{folder}": folder for folder in ("benchmark", "methods", "datamodules", "configs", "results")},
    },
    cmdclass={"build_py": BuildPackages},
)
