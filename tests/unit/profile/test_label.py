"""Labels: each operator of the emitted program has a range, and nothing else is changed."""

from __future__ import annotations

import ast

import torch

import autopar
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.profile.label import labelled
from models import gpt
from tests.helpers.captures import captured_once


def made(recipe: str, mesh: tuple[int, ...] | None = None) -> tuple[autopar.Plan, str, str]:
    torch.manual_seed(0)
    model, batch = gpt.tiny()
    with captured_once(__name__):
        compiled = autopar.compile(model, "cpu:1x4", batch, recipe=recipe, mesh=mesh)
    assert compiled.captured is not None
    return (
        compiled.plan,
        compiled.source,
        labelled(emit(compiled.captured.gm, compiled.plan, Names.of(compiled.captured), probes=True)),
    )


def without_ranges(source: str) -> str:
    """The statements inside of all ranges in their place, without imports of ranges."""

    class Out(ast.NodeTransformer):
        def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
            self.generic_visit(node)
            return node.body if "_range" in ast.unparse(node.items[0]) else node

    tree = Out().visit(ast.parse(source))
    tree.body = [s for s in tree.body if "_range" not in ast.unparse(s)]
    return ast.unparse(tree)


def test_without_the_ranges_it_is_the_emitted_program() -> None:
    for recipe, mesh in (("zero3", None), ("tp_zero3", (2, 2)), ("gpipe", None)):
        _, source, labels = made(recipe, mesh)
        assert without_ranges(labels) == ast.unparse(ast.parse(source)), recipe


def test_every_operator_that_is_priced_has_a_range() -> None:
    plan, _, labels = made("megatron")
    ranged = {
        line.split('"autopar op ')[-1].split("'autopar op ")[-1].split("'")[0]
        for line in labels.splitlines()
        if "_range(" in line
    }
    assert {"blocks_0/gelu", "blocks_0/scaled_dot_product_attention", "cross_entropy_sum"} <= ranged
    assert ranged <= set(plan.nodes)
