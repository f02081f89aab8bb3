"""Checks the contract of the captured graph (docs/internals.md)."""

from __future__ import annotations

from torch import fx

from passes import facts
from passes._torch import OpOverload
from passes.drop_noops import ASSERTS

ROLES = ("param", "buffer", "constant", "input")


def lint(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: a graph after all of NORMALIZE.
    does: checks structure, and that only functional calls with values and provenance are left.
    gives: the graph unchanged, or ValueError that names the first node that breaks the contract, and how."""
    check_structure(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function":
            _check_call(node)
    return gm


def check_structure(gm: fx.GraphModule) -> None:
    """Checks what holds before and after every pass: order of placeholders, roles, values, outputs.

    Raises ValueError with the node and what is wrong with it.
    """
    gm.graph.lint()
    nodes = list(gm.graph.nodes)
    seen_input = False
    for node in nodes:
        if node.op == "placeholder":
            _check_placeholder(node, seen_input)
            seen_input = node.meta["role"] == "input"
    outputs = gm.meta.get("outputs")
    returned = nodes[-1].args[0] if nodes[-1].op == "output" else None
    if outputs is None or not isinstance(returned, (tuple, list)) or len(returned) != len(outputs):
        raise ValueError(f"gm.meta['outputs'] lists {outputs}, the graph returns {returned}: wanted one entry each")


def _check_placeholder(node: fx.Node, seen_input: bool) -> None:
    """Raise ValueError unless a placeholder has a known role, its name and a value; inputs come last."""
    role = node.meta.get("role")
    if role not in ROLES:
        raise ValueError(f"placeholder {node.name} has role {role!r}, wanted one of {ROLES}")
    key = "input" if role == "input" else "fqn"
    if key not in node.meta and "fqns" not in node.meta:
        raise ValueError(f"placeholder {node.name} of role {role!r} has no meta[{key!r}]")
    if seen_input and role != "input":
        raise ValueError(f"placeholder {node.name} of role {role!r} stands behind a user input, wanted before")
    facts.value(node)


def _check_call(node: fx.Node) -> None:
    """Raise ValueError unless a call is functional and has a value, a module path and a source line."""
    target = node.target
    where = facts.where(node)
    if target in ASSERTS:
        raise ValueError(f"assert {node.name} ({where}) is left in the graph: run drop_noops")
    if getattr(target, "__module__", "").startswith("torch._functorch"):
        raise ValueError(
            f"{where} is traced as a transform of torch.func ({getattr(target, '__name__', target)}), whose inside is "
            "about single samples: write it with operators on batches (what torch.func.vmap would make of it)"
        )
    if isinstance(target, OpOverload) and target._schema.is_mutable:
        raise ValueError(f"in-place call {node.name} of {target} ({where}) is left in the graph: run inplace")
    if "device" in node.kwargs:
        raise ValueError(f"call {node.name} of {target} ({where}) names a device: run drop_devices")
    facts.value(node)
    if "module" not in node.meta or "source" not in node.meta:
        raise ValueError(f"call {node.name} of {target} has no module or source: run provenance")
