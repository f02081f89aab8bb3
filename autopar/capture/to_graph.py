"""From an exported program to the fx graph that passes work on: names, roles and outputs. Called by capture.capture."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from autopar._torch import pytree
from autopar.capture.dims import Dims
from autopar.capture.inside import DERIVED
from autopar.capture.shadow import WithLoss
from autopar.errors import CaptureError
from passes import edit
from passes._torch import make_graph_module
from passes.provenance import source_line

ROLES = {
    InputKind.PARAMETER: "param",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}
INNER = f"{WithLoss.INNER}."  # what stands before original names where a loss function was added


def to_graph(
    program: ExportedProgram, dims: Dims, canonical: Callable[[str], str], requires_grad: Mapping[str, bool]
) -> fx.GraphModule:
    """The exported graph with the contract's roles, symbols and outputs. Tied parameters become one placeholder."""
    gm = make_graph_module(program.graph_module, program.graph)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for node in placeholders:
        node.meta["role"] = _role(node, specs[node.name])
    _name_held(
        gm,
        [(node, specs[node.name]) for node in placeholders if node.meta["role"] != "input"],
        canonical,
        requires_grad,
    )
    given = [(node, specs[node.name]) for node in placeholders if node.meta["role"] == "input"]
    gm.meta["leaves"] = [node.name for node, _ in given]
    gm.meta.update(_name_inputs(gm, given, dims), steps=dims.steps)
    gm.meta["constants"] = {
        name.removeprefix(INNER): value.detach() if isinstance(value, torch.Tensor) else value
        for name, value in program.constants.items()
    }
    _mend_places(gm)
    gm.meta["outputs"] = _outputs(program, gm)
    # names as all copies have them, for plans go by names, and none twice: export's are those of arguments, builtins
    # (`input`) and operators (`mean`) too
    gm.graph = copy.deepcopy(gm.graph)
    gm.recompile()
    return gm


def _role(node: fx.Node, spec: Any) -> str:
    """The role of a placeholder. Raises CaptureError for kinds that a captured graph cannot have."""
    if spec.kind in ROLES:
        return ROLES[spec.kind]
    readers = ", ".join(str(user.target) for user in node.users)
    raise CaptureError(
        f"{readers} in forward reads a {getattr(spec.arg, 'class_fqn', spec.kind.name)}, which is neither a tensor nor "
        "a plain value and cannot be part of a graph; a torch.Generator is left out (torch.rand without one draws "
        "from the generator that every rank has), others go behind a torch.library.custom_op"
    )


def _name_held(
    gm: fx.GraphModule,
    held: Sequence[tuple[fx.Node, Any]],
    canonical: Callable[[str], str],
    requires_grad: Mapping[str, bool],
) -> None:
    """Parameters, buffers and constants by their original names, each once, with their number in the model's order."""
    seen: dict[str, fx.Node] = {}
    for number, (node, spec) in enumerate(held):
        name = canonical(spec.target.removeprefix(INNER))
        node.meta["fqn"], node.meta["number"] = name, number
        node._rename(node.name.replace(f"_{WithLoss.INNER}_", "_"))
        node.meta["requires_grad"] = requires_grad.get(name, False)
        if node.meta["role"] == "constant":
            node.meta["val"] = _value(node)
        if name in seen:
            node.replace_all_uses_with(seen[name])
            gm.graph.erase_node(node)
        else:
            seen[name] = node


def _value(node: fx.Node) -> torch.Tensor:
    """The value of a constant, without the wrappers of torch.func. Raises CaptureError where it is an input of a
    torch.func derivative, which torch.export takes for a constant unless it is mapped over samples."""
    try:
        found: torch.Tensor = node.meta["val"].detach()
    except NotImplementedError as error:  # it has no storage of its own
        at = next(map(source_line, node.users), "")
        raise CaptureError(DERIVED + (f"\nat {at}" if at else "")) from error
    return found


def _name_inputs(gm: fx.GraphModule, given: Sequence[tuple[fx.Node, Any]], dims: Dims) -> dict[str, Any]:
    """Inputs by their names: the symbols of their dims, and what is no tensor, which is part of the graph."""
    symbols: dict[str, Any] = {}
    fixed: dict[str, tuple[int, Any]] = {}
    for number, (node, spec) in enumerate(given):
        if not isinstance(spec.arg, TensorArgument):
            fixed[node.name] = (number, getattr(spec.arg, "value", None))  # a plain value (use_cache=False)
            gm.graph.erase_node(node)
            continue
        node.meta["input"] = node.name
        for dim, name in dims.of.get(number, {}).items():
            symbols.setdefault(name, node.meta["val"].shape[dim].node.expr)
    return {"symbols": symbols, "fixed": fixed}


def _mend_places(gm: fx.GraphModule) -> None:
    """Module paths and source lines as the user knows them, without our wrapper and frames."""
    here = re.compile(rf'\s*File "{re.escape(str(Path(__file__).parent))}/[^\n]*(\n(?!\s*File)[^\n]*)*')
    for node in edit.nodes(gm):
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {
            key: (path.removeprefix(INNER) if path != WithLoss.INNER else "", kind)
            for key, (path, kind) in stack.items()
        }
        node.meta["stack_trace"] = here.sub("", node.meta.get("stack_trace") or "")


def _outputs(program: ExportedProgram, gm: fx.GraphModule) -> list[dict[str, str]]:
    """One entry per output that is a tensor; names follow the user's pytree. The others leave the graph."""
    names = _names(program.call_spec.out_spec)
    specs = program.graph_signature.output_specs
    unknown = [spec.kind.name for spec in specs if spec.kind != OutputKind.USER_OUTPUT]
    if unknown:
        raise CaptureError(f"the exported graph has an output of kind {unknown[0]}, which autopar does not know")
    (output,) = [node for node in gm.graph.nodes if node.op == "output"]
    kept = [i for i, spec in enumerate(specs) if isinstance(spec.arg, TensorArgument)]
    output.args = (tuple(output.args[0][i] for i in kept),)
    return [{"name": names[i], "kind": "output", "target": ""} for i in kept]


def structure(program: ExportedProgram) -> tuple[Any, dict[str, str]]:
    """The user's pytree of outputs with the numbers of tensor outputs as leaves, and by name the outputs that are left
    out. Leaves that are no tensors stay, except numbers, which would be mistaken for outputs and become None."""
    leaves: list[Any] = []
    left_out: dict[str, str] = {}
    number = 0
    for name, spec in zip(_names(program.call_spec.out_spec), program.graph_signature.output_specs, strict=True):
        value = getattr(spec.arg, "value", spec.arg)
        if isinstance(spec.arg, TensorArgument):
            leaves.append(number)
            number += 1
        else:
            leaves.append(value if value is None or isinstance(value, (str, bool)) else None)
            left_out |= {name: "is no tensor"} if leaves[-1] is not value else {}
    return pytree.tree_unflatten(leaves, program.call_spec.out_spec), left_out


def _names(spec: Any) -> list[str]:
    """The names of the leaves of a pytree."""
    return list(named_leaves(pytree.tree_unflatten(list(range(spec.num_leaves)), spec)))


def named_leaves(tree: Any) -> dict[str, Any]:
    """`loss`, `logits`, `states.0` for the leaves of a pytree, in order. A label that an earlier leaf has (of the keys
    1 and "1") is given a number."""
    found: dict[str, Any] = {}
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        name = label(path)
        found[next(other for other in _numbered(name) if other not in found)] = leaf
    return found


def _numbered(name: str) -> Iterator[str]:
    """`name`, `name_1`, `name_2` and so on."""
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(1))


def label(path: Any) -> str:
    """A path of torch's trees as text: `a.b.0`; "output" for the empty one."""
    return re.sub(r"^\.|['\]]", "", pytree.keystr(path).replace("['", ".").replace("[", ".")) or "output"
