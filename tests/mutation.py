"""
Changes the code in one small place at a time, and sees whether a test notices.

    python tests/mutation.py --count 300 --seed 0 --out examples/benchmarks/results/mutation.json

Every mutant is a process forked off this one, which has imported everything but the package, so that a mutant costs no
imports. Messages of errors and warnings, docstrings and annotations are left alone: they are read by people.
"""

import argparse
import ast
import importlib
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "peft_luca"
# What is mutated unless --modules says otherwise: a module, or all modules of a folder.
MODULES = ["routing", "tuner.layer", "tuner.experts", "tuner.backbone", "training.metrics", "data.task_stream"]
# Tests that bear on the modules of a folder, beside the folder of the same name in tests/.
MORE_TESTS = {"routing": ["tuner/test_layer.py", "tuner/test_model.py"], "tuner": ["test_invariants.py"]}
# Names of texts for people, and keywords that no test can see: `strict` of `zip` and `repr` of a field.
TEXTS, UNSEEN = (
    {"message", "text", "reason", "found", "needed", "remedy", "refusal", "kind", "leaks"},
    {"strict", "repr"},
)
# A module whose tests are in one file needs no others.
ONE_FILE = {"training.metrics": ["training/test_metrics.py"]}
CPU_SECONDS, SECONDS = 120, 900  # a mutant that takes longer never ends

COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARED |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
COMPUTED |= {ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}


class Mutator(ast.NodeTransformer):
    """Counts the places where a module can be changed, and changes one of them."""

    def __init__(self, target: int | None = None) -> None:
        self.target, self.places = target, 0
        self.change: tuple[int, str, str] | None = None

    def at(self, node: ast.AST, make) -> ast.AST:
        """The node, or what it becomes where this is the place."""
        self.places += 1
        if self.places - 1 != self.target:
            return node
        before = ast.unparse(node)
        changed = ast.copy_location(make(), node)
        self.change = (node.lineno, before, ast.unparse(changed))
        return changed

    def generic_visit(self, node):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if not documented or ast.get_docstring(node, clean=False) is None:
            return super().generic_visit(node)
        docstring, *node.body = node.body
        node = super().generic_visit(node)
        node.body = [docstring, *node.body]
        return node

    def visit_arg(self, node):
        return node  # its annotation

    def visit_FunctionDef(self, node):
        returns, node.returns, decorators = node.returns, None, node.decorator_list
        node.decorator_list = []
        node = self.generic_visit(node)
        node.returns, node.decorator_list = returns, decorators
        return node

    def visit_ClassDef(self, node):
        bases, keywords, decorators = node.bases, node.keywords, node.decorator_list
        node.bases, node.keywords, node.decorator_list = [], [], []
        node = self.generic_visit(node)
        node.bases, node.keywords, node.decorator_list = bases, keywords, decorators
        return node

    def visit_AnnAssign(self, node):
        if node.value is None or "TypeAlias" in ast.unparse(node.annotation):
            return node
        node.value = self.visit(node.value)
        return node

    def visit_Raise(self, node):
        return node if "NotImplementedError" in ast.unparse(node) else self.at(node, ast.Pass)

    def visit_JoinedStr(self, node):
        return node

    def visit_Assert(self, node):
        return node  # for the type checker

    def visit_If(self, node):
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return node
        node = self.generic_visit(node)
        node.test = self.at(node.test, lambda: ast.UnaryOp(ast.Not(), node.test))
        return node

    def visit_IfExp(self, node):
        node = self.generic_visit(node)
        node.test = self.at(node.test, lambda: ast.UnaryOp(ast.Not(), node.test))
        return node

    def visit_Compare(self, node):
        node = self.generic_visit(node)
        kind = COMPARED.get(type(node.ops[0]))
        changed = lambda: ast.Compare(node.left, [kind(), *node.ops[1:]], node.comparators)  # noqa: E731
        return node if kind is None else self.at(node, changed)

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        kind = COMPUTED.get(type(node.op))
        return node if kind is None else self.at(node, lambda: ast.BinOp(node.left, kind(), node.right))

    def visit_AugAssign(self, node):
        node = self.generic_visit(node)
        kind = COMPUTED.get(type(node.op))
        return node if kind is None else self.at(node, lambda: ast.AugAssign(node.target, kind(), node.value))

    def visit_BoolOp(self, node):
        node = self.generic_visit(node)
        kind = ast.Or if isinstance(node.op, ast.And) else ast.And
        return self.at(node, lambda: ast.BoolOp(kind(), node.values))

    def visit_UnaryOp(self, node):
        node = self.generic_visit(node)
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            return self.at(node, lambda: node.operand)
        return node

    def visit_Constant(self, node):
        if isinstance(node.value, bool):
            return self.at(node, lambda: ast.Constant(not node.value))
        if isinstance(node.value, int | float):
            return self.at(node, lambda: ast.Constant(node.value + 1))
        if isinstance(node.value, str):
            return self.at(node, lambda: ast.Constant(node.value + "XX"))
        return node

    def visit_Return(self, node):
        if node.value is None or ast.unparse(node.value) == "None":
            return node
        node = self.generic_visit(node)
        return self.at(node, lambda: ast.Return(ast.Constant(None)))

    def visit_Assign(self, node):
        if isinstance(node.value, ast.Constant | ast.JoinedStr) and {ast.unparse(t) for t in node.targets} <= TEXTS:
            return node
        if ast.unparse(node.value).startswith("dict["):
            return node  # a name for a type
        node.value = self.visit(node.value)
        targets, value = node.targets, ast.Constant(None)
        if isinstance(targets[0], ast.Tuple):
            return node
        return self.at(node, lambda: ast.Assign(targets, value))

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Call):
            return node
        message = ast.unparse(node.value.func) == "warnings.warn"
        return self.at(node if message else self.generic_visit(node), ast.Pass)

    def visit_keyword(self, node):
        return node if node.arg in UNSEEN else self.generic_visit(node)

    def visit_Call(self, node):
        node = self.generic_visit(node)
        for i, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in UNSEEN:
                fewer = [*node.keywords[:i], *node.keywords[i + 1 :]]
                node = self.at(node, lambda fewer=fewer, node=node: ast.Call(node.func, node.args, fewer))
        return node


def mutated(source: str, target: int | None) -> tuple[ast.Module, Mutator]:
    mutator = Mutator(target)
    tree = ast.fix_missing_locations(mutator.visit(ast.parse(source)))
    return tree, mutator


def path_of(module: str) -> Path:
    """`routing.router` → its file; `routing` → the folder's `__init__.py`."""
    path = PACKAGE.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def expand(names: list[str]) -> list[str]:
    """Folders become their modules."""
    found = []
    for name in names:
        folder = PACKAGE.joinpath(*name.split("."))
        inside = sorted(path.stem for path in folder.glob("*.py")) if folder.is_dir() else []
        found += [name if stem == "__init__" else f"{name}.{stem}" for stem in inside] or [name]
    return found


def tests_of(module: str) -> list[list[str]]:
    """Tests that bear on a module, the likeliest to notice first: of its name, of its folder, and of others."""
    if module in ONE_FILE:
        return [ONE_FILE[module]]
    folder, _, name = module.rpartition(".")
    folder, name = folder or module, name or module
    own = [path for path in (f"{folder}/test_{name}.py", f"test_{name}.py") if (ROOT / "tests" / path).exists()]
    rest = sorted(f"{folder}/{path.name}" for path in (ROOT / "tests" / folder).glob("test_*.py"))
    steps = [own, [path for path in rest if path not in own], MORE_TESTS.get(folder, [])]
    return [step for step in steps if step]


def draw(count: int, seed: int, modules: list[str]) -> list[tuple[str, int]]:
    """A sample of the places of all modules."""
    places = []
    for module in modules:
        source = path_of(module).read_text(encoding="utf-8")
        places += [(module, place) for place in range(mutated(source, None)[1].places)]
    return sorted(random.Random(seed).sample(places, min(count, len(places))))


def warm() -> None:
    """Import what the package and its tests import, and neither of them."""
    code = "import helpers, hypothesis, sys; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    for name in found.stdout.split():
        if name.split(".")[0] not in ("peft_luca", "helpers", "__main__"):
            try:
                importlib.import_module(name)
            except Exception:  # parts of packages that are made at run time
                continue


class Loader(importlib.machinery.SourceFileLoader):
    """Gives a module's mutant in its place."""

    def __init__(self, module: str, tree: ast.Module) -> None:
        super().__init__(f"peft_luca.{module}", str(path_of(module)))
        self.tree = tree

    def get_code(self, fullname):
        return compile(self.tree, self.path, "exec")

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)


def run(module: str, place: int | None) -> tuple[str, tuple[int, str, str] | None]:
    """What becomes of one mutant, and what it is: `survived` where no test fails."""
    tree, mutator = mutated(path_of(module).read_text(encoding="utf-8"), place)
    child = os.fork()
    if child == 0:
        os.setpgrp()
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        import pytest

        sys.meta_path.insert(0, Loader(module, tree))
        sys.path.insert(0, str(ROOT))
        os.chdir(ROOT)
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-W", "ignore"]
        code = 3
        try:
            for step in tests_of(module):
                code = pytest.main([*options, *(f"tests/{path}" for path in step)])
                if code:
                    break
        finally:
            os._exit(int(code))
    deadline = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return ("survived" if status == 0 else "killed"), mutator.change
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "killed", mutator.change
        time.sleep(0.02)


def of_results(files: list[Path]) -> tuple[list[tuple[str, int]], Counter[tuple[str, str]]]:
    """The mutants that survived in earlier results, and the counts of those that were killed."""
    survived, killed = [], Counter()
    for file in files:
        results = json.loads(file.read_text(encoding="utf-8"))
        survived += [(mutant["module"], mutant["place"]) for mutant in results["survivors"]]
        for module, counts in results["modules"].items():
            killed[module, "killed"] += counts["killed"]
    return sorted(survived), killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="+", default=MODULES, help="modules or folders, as in tuner.layer routing")
    parser.add_argument(
        "--part", default="1/1", help="i/n: the i-th of n parts of the sample, to run them side by side"
    )
    parser.add_argument("--again", type=Path, nargs="+", help="results whose survivors are tried once more")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    sample = draw(args.count, args.seed, expand(args.modules))[part - 1 :: parts]
    warm()
    for module in sorted({module for module, _ in sample} if part == 1 else ()):
        outcome, _ = run(module, None)
        if outcome != "survived":
            sys.exit(f"the tests of {module} fail as the code is")
    counts: Counter[tuple[str, str]] = Counter()
    if args.again:
        sample, counts = of_results(args.again)
    survivors = []
    for module, place in sample:
        outcome, (line, before, after) = run(module, place)
        counts[module, outcome] += 1
        if outcome == "survived":
            survivors.append({"module": module, "place": place, "line": line, "before": before, "after": after})
            sys.stderr.write(f"{module}:{line}: {before}  ->  {after}\n")
    killed = sum(count for (_, outcome), count in counts.items() if outcome == "killed")
    results = {
        "command": f"python tests/mutation.py --count {args.count} --seed {args.seed}",
        "mutants": sum(counts.values()),
        "killed": killed,
        "share_killed": round(killed / sum(counts.values()), 4),
        "modules": {
            module: {outcome: counts[module, outcome] for outcome in ("killed", "survived")}
            for module in sorted({module for module, _ in counts})
        },
        "survivors": survivors,
    }
    sys.stderr.write(f"{killed} of {results['mutants']} mutants killed\n")
    if args.out:
        args.out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
