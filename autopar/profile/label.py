"""The emitted source with a profiler range around each operator: `with record_function("autopar op layers_0/gelu"):
...`.

Emitted with probes, the source says behind each operator which node of the plan it is; the probes are taken out again,
so that what runs is the emitted program and nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from autopar.runtime.profiler_ranges import PREFIX

OP = f"{PREFIX} op"
"""How the range of an operator begins."""

RANGE = "_range"  # the name of record_function in the labelled source
IMPORT = f"from torch.profiler import record_function as {RANGE}"


def labelled(source: str) -> str:
    """`source`, which was emitted with probes, with ranges in their place."""
    tree = ast.parse(source)
    tree = ast.fix_missing_locations(_Labels().visit(tree))
    after = 1 if ast.get_docstring(tree) is not None else 0
    tree.body[after:after] = ast.parse(IMPORT).body
    return ast.unparse(tree)


class _Labels(ast.NodeTransformer):
    """Replaces the statement in front of a probe, and the probe, by a range around the statement."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = self._block(node.body)
        return node

    def _block(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for statement in statements:
            for name in ("body", "orelse"):
                if isinstance(getattr(statement, name, None), list):
                    setattr(
                        statement,
                        name,
                        self._block(getattr(statement, name)) or [ast.Pass()]
                        if name == "body"
                        else self._block(getattr(statement, name)),
                    )
            probed = _probed(statement)
            if probed is None:
                made.append(statement)
            elif made and not isinstance(made[-1], (ast.With, ast.For, ast.FunctionDef)):
                made.append(_ranged(probed.partition(":")[0], made.pop()))
        return made


def _probed(statement: ast.stmt) -> str | None:
    """The node of `x = self.probe("node", x, ...)`; None for any other statement."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    if (
        not isinstance(call.func, ast.Attribute)
        or call.func.attr != "probe"
        or not isinstance(call.args[0], ast.Constant)
    ):
        return None
    return str(call.args[0].value)


def _ranged(name: str, statement: ast.stmt) -> ast.With:
    call = ast.Call(ast.Name(RANGE, ast.Load()), [ast.Constant(f"{OP} {name}")], [])
    return ast.With([ast.withitem(call)], [statement])
