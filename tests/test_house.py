"""The house: which part may import which, that nothing goes in a circle, and what the joints may not do."""

import ast
import re
import warnings
from pathlib import Path

ROOT = Path(__file__).parent.parent

#: From the ground up; a module may import what stands on its own floor or below. The longest name that fits counts.
FLOORS = (
    (
        "benchmark.errors",
        "benchmark.internals",
        "benchmark.files",
        "benchmark.placing",
        "benchmark.processor",
        "benchmark.seeds",
        "benchmark.ranges",
        "benchmark.masked",
        "benchmark.counts",
        "benchmark.formulas",
        "benchmark.metrics",
        "benchmark.own_metrics",
        "benchmark.intervals",
        "benchmark.config.yaml_files",
        "benchmark.config.files",
        "benchmark.paths",
        "benchmark.command_parser",
        "benchmark.locks",
        "benchmark.shipped",
        "benchmark.drawing",
        "benchmark.hostile",
        "benchmark.signals",
    ),
    ("benchmark.federation", "benchmark.server", "benchmark.delivery", "benchmark.client_store", "benchmark.contract"),
    ("benchmark.privacy", "benchmark.robust", "benchmark.faults", "benchmark.compression"),
    ("benchmark.backbones",),
    ("benchmark.engine",),
    ("benchmark.method", "benchmark.live"),
    ("benchmark.records",),
    ("methods", "datamodules"),
    ("benchmark.config", "benchmark.ranks"),
    ("benchmark.run", "benchmark.predict"),
    ("benchmark.deploy",),
    ("benchmark.checks",),
    ("benchmark.cells",),
    ("benchmark.tables",),
    ("benchmark.tuning",),
    ("benchmark.boards",),
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


def test_private_doors_of_torch_and_lightning_stand_in_one_file() -> None:
    doors = (
        r"torch(\.\w+)*\._[a-zA-Z]|torch\.nn\.modules\.\w+ import _|lightning(\.\w+)*\._[a-z]",
        r"\._(forward|backward)_(pre_)?hooks|_input_metadata|manual_optimization\.|\._current_fx_name|fit_loop\.min_epochs",
    )
    wrong = [
        f"{module}: {line.strip()}"
        for module, path in modules().items()
        if module not in ("benchmark.internals", *PROGRAMS)
        for line in path.read_text().splitlines()
        if re.search("|".join(doors), line) and 'epoch_loop.manual_optimization.optim_step_progress"]' not in line
    ]
    assert not wrong


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
    """Return whether a name is private to its module or class."""
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


#: A docstring that opens so names a thing by a question, which a newcomer has to answer first: it says what is done.
RIDDLES = ("What", "How", "Which", "Where", "Who", "That", "Those", "Whether", "Whatever", "When")


def test_docstrings_say_what_is_done_or_name_the_thing() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    riddles = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in (*modules().values(), *(ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and text.split()[0].strip(",:") in RIDDLES
    ]
    assert riddles == []


def test_names_of_tests_fit_in_75_characters() -> None:
    names = [
        node.name
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [name for name in names if len(name) > 75] == []


def test_files_stay_readable() -> None:
    """A size is a sign that a file is about more than one thing: past 300 lines a warning, past 500 a failure."""
    lines = {module: len(path.read_text().splitlines()) for module, path in modules().items()}
    if long := sorted(module for module, count in lines.items() if count > 300):
        warnings.warn(f"over 300 lines, is each about one thing? {', '.join(long)}", stacklevel=1)
    assert [module for module, count in lines.items() if count > 500] == []


#: What begins as a short description in a paper ends as a short file.
SHORT = ("fedavg", "fedprox", "fedper", "local", "fedvpt", "promptfl", "singlesetvpt")


def constructors() -> dict[str, tuple[ast.ClassDef, ast.FunctionDef]]:
    """Every class of the methods that has a constructor of its own, by name."""
    found = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())) if module.startswith("methods.") else ():
            if isinstance(node, ast.ClassDef):
                own = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"]
                found |= {node.name: (node, own[0])} if own else {}
    return found


def named(constructor: ast.FunctionDef) -> list[ast.arg]:
    """The arguments that a constructor names, without self, ``*`` and ``**``."""
    return [*constructor.args.args[1:], *constructor.args.kwonlyargs]


def handed_to_base(constructor: ast.FunctionDef) -> list[ast.stmt]:
    """Its calls of the base's constructor."""
    return [
        statement
        for statement in constructor.body
        if isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("super().__init__(")
    ]


def handing_on(constructor: ast.FunctionDef) -> set[int]:
    """Lines of a constructor that hand arguments on.

    They are those of its signature that hold anything besides arguments of its own, which the base does not get; the
    call of the base's constructor; and assignments of arguments, as they are, to attributes.
    """
    arguments = {argument.arg: argument for argument in named(constructor)}
    calls = handed_to_base(constructor)
    passed = {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)}
    own = {argument.lineno for name, argument in arguments.items() if name not in passed}
    shared = {argument.lineno for name, argument in arguments.items() if name in passed}
    stored = [
        statement
        for statement in constructor.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        and all(isinstance(value, ast.Name) and value.id in arguments for value in values(statement))
    ]
    signature = set(range(constructor.lineno, constructor.body[0].lineno))
    beside = own - shared - {constructor.lineno, *(a.lineno for a in constructor.args.args[:1])}
    return signature - beside | {
        line for statement in (*calls, *stored) for line in range(statement.lineno, (statement.end_lineno or 0) + 1)
    }


def values(statement: ast.Assign | ast.AnnAssign) -> list[ast.expr | None]:
    """Return the assigned values of a statement, each part of a tuple by itself."""
    return list(statement.value.elts) if isinstance(statement.value, ast.Tuple) else [statement.value]


def code_lines(source: str) -> set[int]:
    """Lines that are neither docstring, comment nor empty."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [n.body[0] for n in ast.walk(ast.parse(source)) if isinstance(n, documented) and ast.get_docstring(n)]
    prose = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    lines = enumerate(source.splitlines(), 1)
    return {number for number, line in lines if line.strip() and not line.strip().startswith("#")} - prose


def test_a_short_method_is_a_short_file() -> None:
    known = modules()
    lines = {name: len(known[f"methods.{name}"].read_text().splitlines()) for name in SHORT}
    assert {name: count for name, count in lines.items() if count > 40} == {}


def test_methods_hand_on_few_arguments() -> None:
    total = sum(len(code_lines(path.read_text())) for name, path in modules().items() if name.startswith("methods."))
    handed = sum(len(handing_on(constructor)) for _, constructor in constructors().values())
    assert handed <= 0.15 * total


def test_arguments_are_documented_where_declared_and_redeclared_only_to_change() -> None:
    made = constructors()
    spelled = {
        name: {argument.arg: (ast.unparse(argument), default(constructor, argument)) for argument in named(constructor)}
        for name, (_, constructor) in made.items()
    }
    problems = []
    for name, (node, _) in made.items():
        text = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        documented = set(re.findall(r"^    (\w+):", text, re.MULTILINE))
        if documented and documented != set(spelled[name]):
            problems.append(f"{name} documents {sorted(documented)}, and declares {sorted(spelled[name])}")
        for base in map(ast.unparse, node.bases):
            again = sorted(spelled[name].items() & spelled.get(base, {}).items())
            problems += [f"{name} declares {argument} as {base} does" for argument, _ in again]
    assert problems == []


def default(constructor: ast.FunctionDef, argument: ast.arg) -> str:
    """The default of an argument as it is written, empty without one."""
    arguments = constructor.args
    given = dict(zip(reversed(arguments.args), reversed(arguments.defaults), strict=False))
    given |= {key: value for key, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value}
    return ast.unparse(given[argument]) if argument in given else ""
