"""The installed package: what a wheel holds, that it works outside of the repository, and what it needs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmark.cells.identity import content_hash

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: What another package is documented to bring.
BROUGHT = {"pydantic-core": "pydantic"}


def required(entries: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", entry)[0].lower().replace("_", "-") for entry in entries}


def imported_packages(folder: str) -> set[str]:
    """Distributions of the modules that files below a folder import, the standard library's and our own left out."""
    names = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    names -= set(sys.stdlib_module_names) | {"benchmark", "methods", "datamodules", "fedprompt"}
    known = metadata.packages_distributions()
    packages = {known.get(name, [name])[0].lower().replace("_", "-") for name in names}
    return {BROUGHT.get(name, name) for name in packages}


def test_what_is_imported_is_declared_and_what_is_declared_is_used() -> None:
    used = imported_packages("benchmark") | imported_packages("methods") | imported_packages("datamodules")
    needed, extras = required(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    optional = set().union(*(required(extras[name]) for name in extras if name not in ("dev", "docs")))
    # The peers that the speed is compared with have an environment of their own; setuptools builds.
    peers = imported_packages("benchmark/speed/peer_scripts") - needed
    assert used - peers <= needed | optional
    assert needed - used <= {"jsonargparse", "rich", "tabulate"}


def test_make_floor_has_the_oldest_torch_that_is_allowed() -> None:
    floor = re.search(r"^FLOOR := torch==([\d.]+) torchvision==([\d.]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert floor is not None
    for name, version in zip(("torch", "torchvision"), floor.groups(), strict=True):
        assert f"{name}>={version.removesuffix('.0')}" in PROJECT["dependencies"]


def test_the_lock_file_has_the_versions_of_the_constraints() -> None:
    """But for the pages' packages: those of the constraints need a newer 3.11 than the project."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    locked = {(package["name"], package["version"]) for package in packages if package["source"] != {"editable": "."}}
    lines = (ROOT / "constraints.txt").read_text().split()
    expected = {
        (re.sub("[-_.]+", "-", name).lower(), version) for name, version in (line.split("==") for line in lines)
    }
    assert {name for name, _ in expected - locked} == {"mkdocs-material", "pymdown-extensions"}
    project = next(package for package in packages if package["source"] == {"editable": "."})
    needed = {(entry["name"], entry.get("specifier")) for entry in project["metadata"]["requires-dist"]}
    groups = PROJECT["optional-dependencies"].values()
    assert {name for name, _ in needed} == required([*PROJECT["dependencies"], *(each for of in groups for each in of)])
    assert {source for package in packages for source in package["source"].values()} == {".", "https://pypi.org/simple"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel is installed, and nothing else."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("benchmark", "methods", "datamodules", "configs", "results/paper"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(source)], check=True)
    wheel = next(source.glob("*.whl"))
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"fedprompt"}
    for file in ("configs/suites/digits.yaml", "results/paper/pfedpg_table1.csv", "benchmark/py.typed"):
        assert f"fedprompt/{file}" in names
    # A configuration names this one; how speed is measured is of a checkout.
    of_speed = {name.rpartition("/")[2] for name in names if name.startswith("fedprompt/benchmark/speed/")}
    assert of_speed == {"__init__.py", "simple_cnn.py"}
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    return site


def run(site: Path, cwd: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in a folder, with the installed package and without the repository."""
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


#: What the pages import, whose classes are the same by both names; then the program that is installed.
BOTH_NAMES = """
import fedprompt, sys
assert fedprompt.__file__.startswith(sys.argv[1]), fedprompt.__file__
import methods, methods.fedvpt, fedprompt.methods.fedvpt
assert FedVPT is methods.FedVPT is fedprompt.methods.fedvpt.FedVPT
assert methods.__file__.startswith(sys.argv[1])
assert fedprompt.methods.fedvpt is methods.fedvpt and methods.fedvpt.__spec__.name == "methods.fedvpt"
print(fedprompt.__version__, flush=True)
import runpy
program, *sys.argv[1:] = sys.argv[2:]
runpy.run_path(program, run_name="__main__")
"""


@pytest.fixture(scope="module")
def used(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, "subprocess.CompletedProcess[str]"]:
    """A user's folder, and a process in it that has imported both names and then run a configuration by its name."""
    shown = re.search(r"```python\n(.*?)```", (ROOT / "docs/installing.md").read_text(), re.DOTALL)
    assert shown
    elsewhere, folder = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("used")
    (elsewhere / "program.py").write_text(shown[1] + ten_lines().partition("seed_everything(0)")[0] + BOTH_NAMES)
    (folder / "methods.py").write_text("raise AssertionError('a module of the user, which is not meant')\n")
    command = (sys.executable, str(elsewhere / "program.py"), str(site), str(site / "bin" / "lightning-cli"))
    fit = ("fit", "--config", "headtune_digits", "--trainer.max_epochs=1", "--run_dir=one")
    return folder, run(site, folder, *command, *fit)


def test_a_wheel_runs_a_configuration_by_its_name_from_any_folder(site: Path, used: Any) -> None:
    folder, done = used
    assert done.returncode == 0, done.stderr
    assert (folder / "one" / "record.json").is_file()
    benchmark = (sys.executable, str(site / "bin" / "benchmark"))
    done = run(site, folder, *benchmark, "verify", "one")
    assert (done.returncode, done.stdout.strip()) == (0, "one: ok"), done.stderr
    listed = run(site, folder, *benchmark, "configs", "suites/")
    assert "suites/digits " in listed.stdout
    assert run(site, folder, *benchmark, "configs", "nothing").returncode == 2
    (folder / "methods.py").unlink()
    program = (
        "import fedprompt\nfrom benchmark.cells.identity import content_hash\n"
        "print(content_hash(['configs/fedvpt_digits.yaml'], ['--data=configs/partitions/iid.yaml']))"
    )
    here = content_hash(["configs/fedvpt_digits.yaml"], ["--data=configs/partitions/iid.yaml"])
    assert run(site, folder, sys.executable, "-c", program).stdout.strip() == here


def ten_lines() -> str:
    """The example of the page about Python."""
    shown = re.search(r"`ten_lines.py`:\n\n```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    assert shown
    return shown[1]


def test_the_ten_lines_run_in_a_folder_outside_of_the_checkout(tmp_path: Path) -> None:
    environment, folder = tmp_path / "environment", tmp_path / "folder"
    for made in (environment, folder):
        made.mkdir()
    (environment / "fedprompt").symlink_to(ROOT / "benchmark/fedprompt")  # what an editable install makes importable
    (folder / "ten_lines.py").write_text(
        ten_lines().replace("round == 2", "round == 0").replace("rounds=2", "rounds=0")
    )
    done = run(environment, folder, sys.executable, "ten_lines.py")
    assert done.returncode == 0, done.stderr
    assert re.search(r"0 +server +test +accuracy +0\.\d+", done.stdout), done.stdout
    assert [path.name for path in folder.iterdir()] == ["ten_lines.py"]


def test_one_name_is_imported_and_classes_are_the_same_by_both(used: Any) -> None:
    assert used[1].stdout.splitlines()[0] == PROJECT["version"], used[1].stderr


def test_another_package_of_the_same_name_is_said(site: Path, tmp_path: Path) -> None:
    (tmp_path / "methods.py").write_text("")
    program = "import sys; sys.path.insert(0, '.'); import methods, fedprompt"
    done = run(site, tmp_path, sys.executable, "-c", program)
    assert done.returncode == 1
    assert "another module methods was imported before" in done.stderr
    assert "rename yours" in done.stderr
