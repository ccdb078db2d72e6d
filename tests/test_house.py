"""The house: which part may import which, that nothing goes in a circle, and what the joints may not do."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: From the ground up; a module may import what stands on its own floor or below. The longest name that fits counts.
FLOORS = (
    (
        "benchmark.errors",
        "benchmark.files",
        "benchmark.seeds",
        "benchmark.ranges",
        "benchmark.masked",
        "benchmark.yaml_files",
        "benchmark.config_files",
        "benchmark.locks",
        "benchmark.drawing",
    ),
    ("benchmark.federation", "benchmark.server", "benchmark.client_store", "benchmark.contract"),
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
#: What methods, rules, data and the engine hand to each other.
JOINTS = {
    *("method", "server", "rule", "data", "datamodule", "simulation", "federation", "roles", "round", "client"),
    *("cohort", "batch", "step", "phase", "shared", "received", "uploads", "values", "broadcast", "evaluation"),
}


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


def engine() -> dict[str, Path]:
    """The modules of the engine, of the contract that it runs, and of what wraps both for Lightning."""
    names = ("benchmark.engine", *FLOORS[1], "benchmark.method")
    return {module: path for module, path in modules().items() if module.startswith(names)}


def test_no_import_of_the_engine_is_for_types_alone() -> None:
    assert [module for module, path in engine().items() if "TYPE_CHECKING" in path.read_text()] == []


def test_a_method_opens_no_file_of_the_engine() -> None:
    known = modules()
    wrong = [
        f"{module} imports {other}"
        for module, path in known.items()
        if module.startswith("methods")
        for other in imported(path, set(known))
        if other.startswith("benchmark.engine")
    ]
    assert not wrong


def test_what_is_handed_over_has_a_type() -> None:
    wrong = []
    for module, path in modules().items():
        if module not in engine() and not module.startswith(("methods", "datamodules")):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                name, kind = node.arg, node.annotation
            elif isinstance(node, ast.AnnAssign):
                name, kind = ast.unparse(node.target).split(".")[-1], node.annotation
            else:
                continue
            if kind is not None and ast.unparse(kind) == "Any" and name in JOINTS:
                wrong.append(f"{module}: {name}")
        if module in FLOORS[1] and re.search(r"\bAny\b", path.read_text()):
            wrong.append(module)
    assert not wrong


def private(name: str) -> bool:
    """Whether a name is another's business only."""
    return name.startswith("_") and not name.endswith("__")


def test_nobody_sets_the_private_state_of_another() -> None:
    wrong = [
        f"{module}: {ast.unparse(node)}"
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and private(node.attr)
        if not isinstance(node.value, ast.Name) or node.value.id not in ("self", "cls")
    ]
    assert not wrong


def test_tests_touch_no_private_name_of_the_engine() -> None:
    own = set()
    for path in engine().values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                own.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
    hidden = {name for name in own if private(name)}
    assert hidden
    wrong = []
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in hidden and ast.unparse(node.value) != "self":
                wrong.append(f"{path.name}: {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("benchmark.engine"):
                wrong += [f"{path.name}: {alias.name}" for alias in node.names if private(alias.name)]
            elif isinstance(node, ast.Constant) and re.search(r"benchmark\.engine\..*\._", str(node.value)):
                wrong.append(f"{path.name}: {node.value}")
    assert not wrong


def test_files_stay_readable() -> None:
    known = modules()
    lines = {module: len(path.read_text().splitlines()) for module, path in known.items()}
    assert lines["benchmark.contract"] <= 232
    assert [m for m, count in lines.items() if m.startswith("benchmark.engine") and count > 200] == []
    assert [m for m, count in lines.items() if count > 400] == []
