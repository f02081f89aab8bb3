"""Original names of what repeated blocks hold: how the name in a block and the instance make it.

An instance of a block is named by its module path, `layers.3`: its `up.weight` is `layers.3.up.weight`. Where that is
not enough (several modules in a row are one block, or a block reads a weight from elsewhere) it is named by a dict,
from the first part of a name in the block to what stands for it: `{"0": "layers.6", "1": "layers.7"}` for `0.up.weight`
and `1.up.weight`.
"""

from __future__ import annotations

from autopar.problem.graph import Program, Run

Naming = str | dict[str, str]


def namings(program: Program, run: Run) -> list[Naming]:
    """The naming of each instance; empty paths where the blocks hold nothing."""
    held = [
        (str(op.node.meta["fqn"]), [str(name) for name in op.node.meta["fqns"]])
        for op in program.ops.values()
        if op.scope == run.scope and op.node.meta.get("fqns")
    ]
    if not held:
        return [""] * run.count
    short, names = held[0]
    paths = [name.removesuffix(f".{short}") for name in names]
    if all(name == f"{path}.{short}" for short, names in held for path, name in zip(paths, names, strict=True)):
        return list(paths)
    return [_heads([(short, names[number]) for short, names in held]) for number in range(run.count)]


def first_path(naming: Naming) -> str:
    """The module path that stands for an instance where one is shown."""
    return naming if isinstance(naming, str) else next(iter(naming.values()))


def _heads(names: list[tuple[str, str]]) -> Naming:
    """The naming of an instance, from its (name in the block, original name) pairs: first part of a name in the block
    -> the path that stands for it."""
    found: dict[str, str] = {}
    for short, name in names:
        head, _, rest = short.partition(".")
        path = name.removesuffix(f".{rest}") if rest else name
        assert f"{path}.{rest}".rstrip(".") == name and found.setdefault(head, path) == path, (
            f"{name} is no {short} of its block"
        )
    return found
