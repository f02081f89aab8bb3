"""Emitted files: golden text of a small one, what they import, a class per distinct block, a reason at every reshard."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

import autopar
from models import mlp
from tests.helpers.blocks import Stack, batch, blocks

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "mlp_tp.py.txt"
IMPORTED = ("torch", "torch.nn.functional", "autopar.runtime", "autopar.runtime.algorithms", "passes.ops")


@functools.cache
def compiled(name: str, recipe: str) -> autopar.Compiled:
    torch.manual_seed(0)
    if name == "mlp":
        model, inputs = mlp.build(32, 64, 4, 10, 8)
    else:
        model, inputs = Stack(blocks("t" + "r" * 5 + "t" * 4)), batch(8)
    return autopar.compile(model, "cpu:1x2", inputs, recipe=recipe)


CASES = [("mlp", "tp"), ("mlp", "zero3"), ("stack", "ddp"), ("stack", "tp")]


def test_the_file_is_as_written_down():
    """To renew after a change that is meant: write `compiled("mlp", "tp").source` to the golden file and read the difference."""
    assert priceless(compiled("mlp", "tp").source) == GOLDEN.read_text()


def priceless(source: str) -> str:
    """Without predicted times: they belong to the cost model."""
    source = re.sub(r"predicted .*", "predicted ...", source)
    source = re.sub(r"\| plan [0-9a-f]{12} \|", "| plan ... |", source)
    return re.sub(r"\d[\d.e+-]* (?:s|ms|us|ns)\b", "... s", source)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_files_import_torch_and_the_runtime_only(case):
    tree = ast.parse(compiled(*case).source)
    found = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    found |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert found <= set(IMPORTED)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_reshard_says_why(case):
    lines = compiled(*case).source.splitlines()
    at = [i for i, line in enumerate(lines) if re.search(r"= (reshard|gather)\(", line)]
    for i in at:
        said = lines[i] if "  # " in lines[i] else lines[i - 1]
        assert re.search(r"# .*(all-gather|all-reduce|reduce-scatter|all-to-all|slice|mask)", said), lines[i]


@pytest.mark.parametrize(("name", "count"), [("mlp", 1), ("stack", 2)])
def test_a_class_per_distinct_block(name, count):
    tree = ast.parse(compiled(name, "tp" if name == "mlp" else "ddp").source)
    bases = [n.bases[0].id for n in tree.body if isinstance(n, ast.ClassDef)]
    assert bases == ["Block"] * count + ["ShardedModule"]


def test_the_same_plan_gives_the_same_text():
    fresh = autopar.compile(*[Stack(blocks("t" + "r" * 5 + "t" * 4)), "cpu:1x2", batch(8)], recipe="ddp")
    assert fresh.source == compiled("stack", "ddp").source
