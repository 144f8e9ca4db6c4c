"""The package's shape: imports go one way and in no circle, files stay small, and tests/ has the same folders."""

import ast
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "peft_luca"
FILES = sorted(PACKAGE.rglob("*.py"))
# A module imports from its own folder and from what is to its left.
STAGES = ["_version _registration", "utils", "preprocessing", "routing", "tuner", "inference visualization"]
STAGES += ["hub", "data", "training", "cli"]
RANK = {name: rank for rank, names in enumerate(STAGES) for name in names.split()}
# routing/ takes tensors and returns tensors.
NOT_IN_ROUTING = {"peft", "transformers", "datasets", "safetensors", "huggingface_hub", "PIL", "json", "os", "pathlib"}
MOST_LINES = {"file": 450, "class": 350, "function": 60, "package": 9000}


def module_of(path):
    """`peft_luca/hub/saving.py` → `hub.saving`; a folder's `__init__.py` → `hub`; the package's own → ``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


MODULES = {module_of(path): path for path in FILES}


def imports(path):
    """The package's modules that a file imports, anywhere in it, and the other packages."""
    own, others = set(), set()
    folder = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            others |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            others.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            base = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{base}.{alias.name}".strip(".")
                own.add(inner if inner in MODULES else base)
    return own - {module_of(path)}, others


GRAPH = {name: imports(path) for name, path in MODULES.items()}


def stage(module):
    return module.split(".")[0]


def test_every_module_has_a_stage():
    assert {stage(module) for module in MODULES} - {""} <= set(RANK)
    assert all(name in MODULES for own, _ in GRAPH.values() for name in own)


def test_no_module_imports_the_package_by_its_name():
    assert not [module for module, (_, others) in GRAPH.items() if "peft_luca" in others]


def test_imports_go_one_way():
    wrong = [
        f"{module} imports {other}"
        for module, (own, _) in GRAPH.items()
        for other in own
        if module and stage(other) != stage(module) and RANK.get(stage(other), 99) >= RANK[stage(module)]
    ]
    assert not wrong


def test_there_is_no_circle():
    done, path = set(), []

    def visit(module):
        assert module not in path, " → ".join([*path[path.index(module) :], module])
        if module not in done:
            path.append(module)
            for other in sorted(GRAPH[module][0]):
                visit(other)
            done.add(path.pop())

    for module in GRAPH:
        visit(module)


def test_nothing_of_the_package_is_imported_inside_a_function():
    wrong = [
        f"{module}.{function.name}"
        for module, path in MODULES.items()
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def test_routing_knows_no_file_no_model_and_no_trainer():
    wrong = {module: others & NOT_IN_ROUTING for module, (_, others) in GRAPH.items() if stage(module) == "routing"}
    assert not {module: others for module, others in wrong.items() if others}


def sizes(kind):
    """Lines of each file, class or function; a function's docstring is not counted."""
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        if kind == "file":
            yield module, len(text.splitlines())
            continue
        for node in ast.walk(ast.parse(text)):
            lines = getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0) + 1
            if kind == "class" and isinstance(node, ast.ClassDef):
                yield f"{module}.{node.name}", lines
            elif kind == "function" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = node.body[0] if ast.get_docstring(node) else None
                yield (
                    f"{module}.{node.name}",
                    lines - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0),
                )


@pytest.mark.parametrize("kind", ["file", "class", "function"])
def test_nothing_is_too_long(kind):
    assert not {name: lines for name, lines in sizes(kind) if lines > MOST_LINES[kind]}


def test_the_package_is_not_too_long():
    assert sum(lines for _, lines in sizes("file")) <= MOST_LINES["package"]


def test_tests_have_the_folders_of_the_package_and_say_what_they_test():
    folders = {path.parent.name for path in FILES} - {"peft_luca"}
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    assert {path.parent.name for path in files} == {*folders, "tests"}
    assert not [path.name for path in files if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
