"""The rules of this repository, as tests: layers, private names, sizes of files, docstrings, import orders."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
FOLDERS = ("autopar", "passes", "models", "tests", "benchmarks", "examples")
FREE_OF_TORCH = (
    "autopar",
    "autopar.errors",
    "autopar.layout",
    "autopar.window_rows",
    "autopar.optimizers",
    "autopar.plan",
    "autopar.cluster",
    "autopar.search",
    "autopar.cli.app",
)


def files(*folders: str) -> list[Path]:
    """All Python files of some folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    """`autopar/cost/comm.py` -> `autopar.cost.comm`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a file: several tests look through them."""
    return tuple(ast.walk(tree))


@cache
def imports(tree: ast.Module) -> tuple[str, ...]:
    """Every name that a file imports when it runs, in full; those under `if TYPE_CHECKING` do not run."""
    skipped = {
        id(n)
        for branch in nodes(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for part in branch.body
        for n in ast.walk(part)
    }
    found: list[str] = []
    for node in nodes(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def private_torch(tree: ast.Module) -> Iterator[str]:
    """Private torch names that a file imports or reaches through `torch.`; operators (`torch.ops...`) have public names
    only."""
    found = [name for name in imports(tree) if name.split(".")[0] == "torch"]
    found += [
        text
        for node in nodes(tree)
        if isinstance(node, ast.Attribute) and (text := ast.unparse(node)).startswith("torch.")
    ]
    for name in found:
        if not name.startswith("torch.ops.") and re.search(r"\._(?!_)", name):
            yield name


def undocumented(tree: ast.Module) -> Iterator[str]:
    """The module and its public functions and classes that have no docstring."""
    if tree.body and not ast.get_docstring(tree):
        yield "the module"
    for node in tree.body:
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            yield node.name


def of_the_locale(tree: ast.Module) -> Iterator[str]:
    """Calls that read or write text of a file and leave its encoding to the locale."""
    for node in nodes(tree):
        if isinstance(node, ast.Call) and not any(word.arg == "encoding" for word in node.keywords):
            text = ast.unparse(node.func)
            modes = [
                each
                for each in (*node.args, *(word.value for word in node.keywords))
                if isinstance(each, ast.Constant) and each.value in ("r", "w", "a", "x")
            ]
            if text.endswith((".read_text", ".write_text")) or (
                modes and text.rsplit(".", 1)[-1] in ("open", "fdopen")
            ):
                yield ast.unparse(node)


def parts() -> list[str]:
    """The parts of autopar from the lowest to the highest, as docs/internals.md lists them."""
    block = (ROOT / "docs" / "internals.md").read_text().split("\n## ")[0]
    listed = re.findall(r"^    autopar/(\S+)", block, re.MULTILINE)
    return [f"autopar.{part.strip('/').removesuffix('.py')}" for part in listed]


def part_of(name: str, order: list[str]) -> int | None:
    """The place of a module in the order, None for one outside of it (`autopar` itself, `autopar._torch`)."""
    return next((i for i, part in enumerate(order) if name == part or name.startswith(f"{part}.")), None)


def climbs(path_name: str, tree: ast.Module, order: list[str]) -> Iterator[str]:
    """Imports of a part that stands higher."""
    here = part_of(path_name, order)
    for name in imports(tree):
        there = part_of(name, order)
        if here is not None and there is not None and there > here:
            yield name


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_pytest_looks_into_every_folder_of_tests(request: pytest.FixtureRequest) -> None:
    skipped = request.config.getini("norecursedirs")
    folders = {path.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [
        (path, pattern) for path in folders for part in path.parts[:-1] for pattern in skipped if fnmatch(part, pattern)
    ]


def test_every_part_is_in_the_list_of_layers() -> None:
    order = parts()
    missing = [
        name
        for p in files("autopar")
        if (name := name_of(p)) not in ("autopar", "autopar._torch") and part_of(name, order) is None
    ]
    assert not missing, f"docs/internals.md does not place {missing}"


def test_nothing_imports_a_higher_layer() -> None:
    order = parts()
    wrong = {name_of(p): found for p in files("autopar") if (found := list(climbs(name_of(p), parsed(p), order)))}
    assert not wrong


@pytest.mark.parametrize("folder", ["passes", "models"])
def test_passes_and_models_import_nothing_of_autopar(folder: str) -> None:
    wrong = {
        str(p): found
        for p in files(folder)
        if (found := [n for n in imports(parsed(p)) if n.split(".")[0] == "autopar"])
    }
    assert not wrong


def test_the_runtime_imports_only_torch_and_layouts() -> None:
    allowed = (
        "torch",
        "autopar.runtime",
        "autopar.layout",
        "autopar.window_rows",
        "autopar.routing",
        "autopar.buckets",
        "autopar.deferred_waits",
        "autopar.prefetching",
        "autopar.optimizers",
        "autopar.errors",
        "autopar.torchrun",
        "autopar._torch",
    )
    wrong = {}
    for path in files("autopar/runtime"):
        others = [
            n
            for n in imports(parsed(path))
            if n.split(".")[0] not in sys.stdlib_module_names
            and not any(n == a or n.startswith(f"{a}.") for a in allowed)
        ]
        if others:
            wrong[str(path.relative_to(ROOT))] = others
    assert not wrong


def test_codegen_does_not_see_the_search() -> None:
    hidden = ("autopar.search", "autopar.recipes", "autopar.planner", "autopar.problem.build", "autopar.problem.types")
    wrong = {
        str(p): found
        for p in files("autopar/codegen")
        if (found := [n for n in imports(parsed(p)) if n.startswith(hidden)])
    }
    assert not wrong


def test_a_search_sees_numbers_only() -> None:
    allowed = ("autopar.search", "autopar.problem.types", "autopar.problem.presolve", "autopar.errors")
    wrong = {
        str(p): found
        for p in files("autopar/search")
        if (
            found := [
                n
                for n in imports(parsed(p))
                if n.startswith(("autopar", "passes", "torch")) and not n.startswith(allowed)
            ]
        )
    }
    assert not wrong


def test_private_names_of_torch_are_in_one_place() -> None:
    wrong = {
        str(p): found
        for p in files("autopar", "passes")
        if p.name != "_torch.py" and (found := sorted(set(private_torch(parsed(p)))))
    }
    assert not wrong


def test_text_files_are_utf8_whatever_the_locale() -> None:
    """A model may have names that other encodings lack, and a plan is made on one machine and read on another."""
    wrong = {str(p): found for p in files("autopar", "passes") if (found := list(of_the_locale(parsed(p))))}
    assert not wrong


def test_no_file_is_long() -> None:
    long = {str(p): n for p in files(*FOLDERS) if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


def test_public_names_have_docstrings() -> None:
    wrong = {str(p): found for p in files("autopar", "passes") if (found := list(undocumented(parsed(p))))}
    assert not wrong


MAPPED = ("codegen", "pipeline", "problem", "search", "simulate")
"""Packages whose docstring says what each module is for."""


@pytest.mark.parametrize("package", MAPPED)
def test_docstrings_of_packages_name_every_module(package: str) -> None:
    folder = ROOT / "autopar" / package
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    rows = [line for line in text.split("\n") if "  " in line]
    missing = {path.stem for path in folder.glob("*.py")} - {"__init__", *re.findall(r"\w+", " ".join(rows))}
    assert not missing, f"autopar/{package}/__init__.py has no row for {sorted(missing)}"


@pytest.mark.parametrize(
    "order", ["import passes; import autopar; autopar.compile", "import autopar; autopar.compile; import passes"]
)
def test_both_import_orders_work(order: str) -> None:
    done = subprocess.run([sys.executable, "-c", order], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_plain_parts_do_not_load_torch() -> None:
    code = (
        f"import sys, importlib\nfor name in {FREE_OF_TORCH!r}:\n    importlib.import_module(name)\n    assert 'torch' "
        "not in sys.modules, name"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_checks_find_what_they_look_for() -> None:
    order = ["autopar.layout", "autopar.search"]
    tree = ast.parse(
        "import torch\nfrom autopar.search import ilp\nfrom torch.fx._x import y\nfrom typing import TYPE_CHECKING\nif "
        "TYPE_CHECKING:\n    import autopar.api\ntorch.a._b\ntorch.ops.aten._c.default\ndef f(): pass\ndef _g(): pass"
    )
    assert list(climbs("autopar.layout", tree, order)) == ["autopar.search.ilp"]
    assert list(climbs("autopar.search.mcmc", tree, order)) == []
    assert set(private_torch(tree)) == {"torch.fx._x.y", "torch.a._b"}
    assert list(undocumented(tree)) == ["the module", "f"]
    assert "autopar.api" not in list(imports(tree))
    calls = ast.parse(
        "p.read_text()\np.write_text(x)\nopen(p, 'w')\np.open(mode='r')\np.read_text(encoding='utf-8')\nopen(p, "
        "'rb')\nboard.open(y)\nos.fdopen(h, 'w', encoding='utf-8')"
    )
    assert list(of_the_locale(calls)) == ["p.read_text()", "p.write_text(x)", "open(p, 'w')", "p.open(mode='r')"]
