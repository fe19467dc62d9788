"""The rules of the layout that imports alone don't show. That they point one way, import-linter holds."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fstep

ROOT = Path(fstep.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
TREES = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
PURE = {name: tree for name, tree in TREES.items() if name.startswith(("state/", "ops/"))}

MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = {
    *("list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "count", "cycle", "iter"),
    *("WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "ContextVar", "Lock", "Generator", "default_rng"),
    *("zeros", "ones", "empty", "full", "array", "arange", "tensor"),
}
IMPURE_MODULES = {
    *("os", "sys", "io", "pathlib", "shutil", "tempfile", "glob", "mmap", "logging", "warnings", "pickle", "sqlite3"),
    *("socket", "ssl", "http", "urllib", "requests", "subprocess", "multiprocessing", "threading", "asyncio", "signal"),
    *("time", "datetime", "random", "secrets", "uuid"),
}
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "breakpoint", "globals", "__import__"}
IMPURE_ATTRIBUTES = {"tofile", "fromfile", "memmap", "savez", "loadtxt", "savetxt", "random", "manual_seed"}


def where(name: str, node: ast.AST) -> str:
    return f"fstep/{name}:{node.lineno}: {ast.unparse(node).splitlines()[0]}"


def every(trees: dict[str, ast.Module], *kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    return ((name, node) for name, tree in trees.items() for node in ast.walk(tree) if isinstance(node, kinds))


def called(node: ast.expr) -> str:
    """The last name of what is called: `deque` of `collections.deque()`."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def lasting(body: list[ast.stmt]) -> Iterator[ast.Assign | ast.AnnAssign | ast.AugAssign]:
    """The assignments that live as long as a module: its own, those under its conditions, and its classes'."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from lasting(getattr(node, part, []))


def is_mutable(value: ast.expr | None) -> bool:
    return isinstance(value, MUTABLE_NODES) or (isinstance(value, ast.Call) and called(value) in MUTABLE_CALLS)


def test_all_files_are_seen():
    assert {"cli.py", "state/batch.py", "ops/philox.py", "shell/engine.py"} <= TREES.keys()


@pytest.mark.parametrize(
    "source", ["a = []", "a: dict = {}", "if b:\n  a = set()", "class A:\n  b = collections.deque()"]
)
def test_a_module_level_mutable_is_recognised(source):
    assert any(is_mutable(node.value) for node in lasting(ast.parse(source).body))


def test_no_module_keeps_anything_mutable():
    found = [
        where(name, node)
        for name, tree in TREES.items()
        for node in lasting(tree.body)
        if is_mutable(node.value) and ast.unparse(getattr(node, "target", None) or node.targets[0]) != "__all__"
    ]
    assert found == []


def test_no_global_statement():
    assert [where(name, node) for name, node in every(TREES, ast.Global)] == []


def test_state_and_ops_import_nothing_that_does_io_or_knows_the_time():
    found = []
    for name, node in every(PURE, ast.Import, ast.ImportFrom):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        found += [where(name, node) for module in modules if module.split(".")[0] in IMPURE_MODULES]
    assert found == []


def test_state_and_ops_call_nothing_that_does_io_or_draws_at_random():
    calls = [where(name, node) for name, node in every(PURE, ast.Call) if called(node) in IMPURE_CALLS]
    attributes = [where(name, node) for name, node in every(PURE, ast.Attribute) if node.attr in IMPURE_ATTRIBUTES]
    assert calls + attributes == []


def test_functions_are_short_and_classes_narrow():
    functions = list(every(TREES, ast.FunctionDef, ast.AsyncFunctionDef))
    sizes = sorted(node.end_lineno - node.lineno + 1 for _, node in functions)
    assert statistics.median(sizes) <= 10
    assert sizes[int(0.9 * len(sizes))] < 40
    assert [where(name, node) for name, node in functions if node.end_lineno - node.lineno + 1 > 80] == []
    classes = every(TREES, ast.ClassDef)
    fields = {where(name, node): sum(isinstance(each, ast.AnnAssign) for each in node.body) for name, node in classes}
    assert {name: count for name, count in fields.items() if count > 20} == {}


IMPORT = """
import sys, time
began = time.thread_time()
import {module}
print(time.thread_time() - began, "torch" in sys.modules)
"""


def import_seconds(module: str) -> tuple[float, bool]:
    """What a fresh process takes to import it, without its waits for others, and whether torch came along."""
    command = [sys.executable, "-c", IMPORT.format(module=module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent)
    seconds, torch = done.stdout.split()
    return float(seconds), torch == "True"


@pytest.mark.parametrize("module", ["fstep", "fstep.state", "fstep.ops", "fstep.interop", "fstep.testing", "fstep.cli"])
def test_imports_fast_and_without_torch(module):
    """In seconds of the processor, the best of up to five: the machine may be busy with something else."""
    for _ in range(5):
        seconds, torch = import_seconds(module)
        assert not torch
        if seconds < 0.4:
            return
    pytest.fail(f"import {module} takes {seconds:.2f} s at best")
