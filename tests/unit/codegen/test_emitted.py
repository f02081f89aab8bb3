"""Emitted files: golden text of a small one, what they import, a class per distinct block, a reason at every
reshard."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen import module
from autopar.codegen.edges import in_pair, needed, out_pair
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.problem.read_graph import read
from models import mlp
from tests.helpers.blocks import Stack, batch, blocks
from tests.helpers.captures import captured_once
from tests.helpers.divided import divided
from tests.helpers.verify import by_recipe, subject

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "mlp_tp.py.txt"
IMPORTED = ("torch", "torch.nn.functional", "autopar.runtime", "autopar.runtime.algorithms", "passes.ops")


@functools.cache
def compiled(name: str, recipe: str) -> autopar.Compiled:
    torch.manual_seed(0)
    if name == "mlp":
        model, inputs = mlp.build(32, 64, 4, 10, 8)
    else:
        model, inputs = Stack(blocks("t" + "r" * 5 + "t" * 4)), batch(8)
    with captured_once((__name__, name)):
        return autopar.compile(model, "cpu:1x2", inputs, recipe=recipe)


NAMES = ['"""', "ends in \\", r"racks\unit", 'a"', "two\nlines", '"""\nraise SystemExit\n"""']
CASES = [("mlp", "tp"), ("mlp", "zero3"), ("stack", "ddp"), ("stack", "tp")]


def test_the_file_is_as_written_down():
    """To renew after a change that is meant: write `compiled("mlp", "tp").source` to the golden file and read the
    difference."""
    assert priceless(compiled("mlp", "tp").source) == GOLDEN.read_text()


def priceless(source: str) -> str:
    """Without predicted times: they belong to the cost model."""
    source = re.sub(r"predicted .*", "predicted ...", source)
    source = re.sub(r"\| plan [0-9a-f]{12} \|", "| plan ... |", source)
    return re.sub(r"\d[\d.e+-]* (?:s|ms|us|ns)\b", "... s", source)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text_whatever_is_in_them(name):
    made = compiled("mlp", "tp")
    plan = replace(made.plan, model=name, strategy=name, cluster={**made.plan.cluster, "name": name})
    tree = ast.parse(emit(made.captured.gm, plan, Names.of(made.captured)))
    assert ast.get_docstring(tree).startswith(f"{' '.join(name.split())} on {' '.join(name.split())} | mesh rank=2 | ")
    assert ast.dump(ast.Module(tree.body[1:], [])) == ast.dump(ast.Module(ast.parse(made.source).body[1:], []))


class Oddly(nn.Module):
    """Parts with names that are no names of Python, as ModuleDicts have them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Sequential(nn.Linear(width, width), nn.Tanh()) for name in NAMES})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = x + part(x)
        return x.square().mean()


def test_weights_may_have_any_name():
    torch.manual_seed(0)
    source = autopar.compile(Oddly(), "cpu:1x2", (torch.randn(8, 16),), recipe="tp").source
    space = {"__name__": "emitted"}
    exec(source, space)
    assert {f"parts.{name}.0.weight" for name in NAMES} <= {*space["Model"].PARAMS, *space["Model"].ORDER}
    assert (
        {text for name in NAMES for text in (f"parts.{name}.0.weight", f"parts.{name}.0.bias")}
        >= {
            node.slice.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "self.w"
        }
        != set()
    )


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


@pytest.mark.parametrize(
    ("model", "recipe", "readers"),
    [("hf-llama", "tp_sp", 3), pytest.param("hf-t5", "tp_sp", 3, marks=pytest.mark.slow)],
)
def test_readers_that_ask_for_the_same_share_one_seam(model, recipe, readers):
    who = subject(model)
    plan = by_recipe(who, (2,), recipe)
    program = read(who.captured.gm, plan.hints, training=True)
    source = emit(who.captured.gm, plan, Names.of(who.captured))
    asked = [
        (op.scope, ref, out_pair(plan, ref), in_pair(plan, op.name, i))
        for op in program.ops.values()
        for i, ref in enumerate(op.operands)
    ]
    moved = [entry for entry in asked if needed(entry[2], entry[3]) and program.ops[entry[1][0]].role != "param"]
    fed = [
        (out_pair(plan, feed), in_pair(plan, port, 0))
        for run in program.runs.values()
        for port, feed in zip(run.ports, run.feeds, strict=True)
    ]
    carried = [
        (out_pair(plan, ref), in_pair(plan, port, 0))
        for run in program.runs.values()
        for port, ref in zip(run.ports, run.carried, strict=False)
    ]
    written = re.findall(r"= reshard\((?!self\.w)", source)
    assert len(written) == len(dict.fromkeys(moved)) + sum(needed(*pair) for pair in (*fed, *carried))
    shared = [entry for entry in dict.fromkeys(moved) if moved.count(entry) > 1]
    assert max(map(moved.count, shared)) == readers


@pytest.mark.parametrize(("name", "count"), [("mlp", 1), ("stack", 2)])
def test_a_class_per_distinct_block(name, count):
    tree = ast.parse(compiled(name, "tp" if name == "mlp" else "ddp").source)
    bases = [n.bases[0].id for n in tree.body if isinstance(n, ast.ClassDef)]
    assert bases == ["Block"] * count + ["ShardedModule"]


def test_the_same_plan_gives_the_same_text():
    fresh = autopar.compile(*[Stack(blocks("t" + "r" * 5 + "t" * 4)), "cpu:1x2", batch(8)], recipe="ddp")
    assert fresh.source == compiled("stack", "ddp").source


def test_stages_that_do_the_same_are_written_once() -> None:
    """A stage with other blocks than an earlier one, and nothing else that is different, is a subclass of that with its
    blocks only."""
    source = autopar.compile(Stack(blocks("t" * 16)), "cpu:1x2", batch(8), recipe="interleaved").source
    stages = {
        node.name: node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name.startswith("Stage")
    }
    bases = {name: ast.unparse(node.bases[0]) for name, node in stages.items()}
    alike = {name: base for name, base in bases.items() if base != "Stage"}
    assert len(stages) == 4 and alike, "some stages have the same number of blocks"
    for name, base in alike.items():
        assert bases[base] == "Stage"
        about, (blocks_of, blocks_of_base) = (
            stages[name].body[0],
            [
                [ast.unparse(line) for line in stages[each].body if "RUNS =" in ast.unparse(line)]
                for each in (name, base)
            ],
        )
        assert len(stages[name].body) == 2 and isinstance(about, ast.Expr) and blocks_of != blocks_of_base
    bodies = [
        "".join(ast.unparse(line) for line in node.body[1:] if "RUNS =" not in ast.unparse(line))
        for name, node in stages.items()
        if name not in alike
    ]
    assert len(set(bodies)) == len(bodies)


class Wave(torch.nn.Module):
    """A map and a function of it."""

    wave = staticmethod(torch.tanh)

    def __init__(self):
        super().__init__()
        self.map = torch.nn.Linear(8, 8)

    def forward(self, x):
        return x + self.wave(self.map(x))


class Block(Wave):
    wave = staticmethod(torch.relu)


class Block2(Wave):
    """Of the name that the file gives to the one before, since it has a `Block` of its own."""


class Named(torch.nn.Module):
    """Alike blocks of two classes."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.ModuleList(kind() for _ in range(4)) for kind in (Block, Block2))

    def forward(self, x, y):
        for layer in (*self.first, *self.second):
            x = layer(x)
        return (x - y).square().mean()


def test_each_class_of_blocks_has_a_name_of_its_own():
    torch.manual_seed(0)
    model, data = Named(), (torch.randn(4, 8), torch.randn(4, 8))
    made = autopar.compile(model, "cpu:1x1", data, recipe="single")
    assert re.findall(r"^class (\w+)\(Block\)", made.source, re.MULTILINE) == ["Block2", "Block22"]
    torch.testing.assert_close(made.train_step(*data), model(*data).detach())


@pytest.mark.parametrize("name", ["Block", "Stage", "Stage1", "gather", "main"])
def test_no_block_has_a_name_that_the_file_uses_otherwise(name, monkeypatch):
    plan, gm = compiled("stack", "ddp").plan, compiled("stack", "ddp").captured.gm
    program = read(gm, plan.hints, training=True)
    monkeypatch.setattr(module, "_module_class", lambda *_: name)
    found = list(
        module._class_names(
            program, replace(plan, stages=plan.stages * 4), gm, [[scope] for scope in program.runs]
        ).values()
    )
    assert len(found) == len(program.runs) > 1 and all(text.startswith(name) for text in found)
    assert (
        len({*found, *module.RESERVED, *module.USED_IN_SCOPES, *(f"Stage{i}" for i in range(4))})
        == len(found) + len({*module.RESERVED, *module.USED_IN_SCOPES}) + 4
    )


def test_a_class_says_how_many_blocks_are_its_own() -> None:
    who = divided("hf-llama")
    plan = replace(by_recipe(who, (2,), "zero3"), parted=who.captured.parts)
    classes = [
        node
        for node in ast.parse(emit(who.captured.gm, plan, Names.of(who.captured))).body
        if type(node) is ast.ClassDef
    ]
    says = [text for node in classes if (text := ast.get_docstring(node)) and "nstance" in text]
    assert len(says) == 3 and sum(text.startswith("One instance of ") for text in says) >= 2
