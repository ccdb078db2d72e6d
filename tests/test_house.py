"""The house: which part may import which, that nothing goes in a circle, and what the joints may not do."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: From the ground up; a module may import what stands on its own floor or below. The longest name that fits counts.
FLOORS = (
    (
        "benchmark.errors",
        "benchmark.seeds",
        "benchmark.ranges",
        "benchmark.masked",
        "benchmark.yaml_files",
        "benchmark.locks",
        "benchmark.drawing",
    ),
    ("benchmark.federation", "benchmark.server", "benchmark.contract"),
    ("benchmark.backbones",),
    ("benchmark.engine",),
    ("benchmark.method",),
    ("benchmark.records",),
    ("methods", "datamodules"),
    ("benchmark.run",),
    ("benchmark.cells",),
    ("benchmark.tables",),
    ("benchmark.figures",),
    ("benchmark.report",),
    ("benchmark.speed",),
    ("benchmark.commands",),
    ("benchmark",),
)
#: What trains and commits the micro backbones is a program of its own.
PROGRAMS = ("benchmark.backbones.micro.pretrain",)


def modules() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    found = {}
    for package in ("benchmark", "methods", "datamodules"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: set[str], at_start: bool = False) -> set[str]:
    """Modules of the product that a file imports, types alone aside.

    Args:
        path: of the file.
        known: all modules.
        at_start: only what is imported when the module is.
    """
    tree = ast.parse(path.read_text())
    types = {
        node for branch in ast.walk(tree) if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }  # fmt: skip
    names = set()
    for node in tree.body if at_start else ast.walk(tree):
        if node in types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (below & known) or {node.module}
    return names & known


def floor(module: str) -> int:
    """The number of the floor on which a module stands."""
    fitting = [
        (len(name), n) for n, names in enumerate(FLOORS) for name in names if f"{module}.".startswith(f"{name}.")
    ]
    return max(fitting)[1]


def test_imports_point_downwards() -> None:
    known = modules()
    wrong = [
        f"{module} imports {other}"
        for module, path in known.items()
        if module not in PROGRAMS
        for other in sorted(imported(path, set(known)))
        if floor(other) > floor(module)
    ]
    assert not wrong


def test_no_import_goes_in_a_circle() -> None:
    known = modules()
    graph = {module: imported(path, set(known), at_start=True) - {module} for module, path in known.items()}
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in graph[module]:
                walk(other, (*way, module))
            done.add(module)

    for module in graph:
        walk(module, ())


def test_no_hook_is_asked_whether_it_is_overridden() -> None:
    asked = re.compile(r"type\(\w+(\.\w+)*\)\.\w+ is (not )?\w+\.\w+")
    found = [f"{module}: {hit[0]}" for module, path in modules().items() if (hit := asked.search(path.read_text()))]
    assert not found


def test_files_stay_readable() -> None:
    known = modules()
    lines = {module: len(path.read_text().splitlines()) for module, path in known.items()}
    assert lines["benchmark.contract"] <= 235
    assert [m for m, count in lines.items() if m.startswith("benchmark.engine") and count > 200] == []
