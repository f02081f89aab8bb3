"""Exports small models for tests of passes, and runs graphs on real tensors."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

from autopar._torch import without_fake_cache
from autopar.capture._torch import code_when_asked, stacks_of_callers
from passes import edit, facts
from passes._torch import make_graph_module
from passes.interpret import Interpret

B, S = Dim("b"), Dim("s")
KINDS = {"PARAMETER": "param", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant", "USER_INPUT": "input"}


def export_graph(model: nn.Module, args: tuple = (), kwargs: dict | None = None, dims: Any = None) -> fx.GraphModule:
    """Graph of `model` with roles, symbols and outputs; `dims` maps each input name to its `{dim: Dim}`."""
    kwargs = kwargs or {}
    with without_fake_cache(), code_when_asked(), stacks_of_callers():  # as the product captures models of this size
        ep = export(model, args, kwargs, dynamic_shapes=dims, strict=False)
        gm = make_graph_module(ep.graph_module, ep.graph)
    specs = {spec.arg.name: spec for spec in ep.graph_signature.input_specs}
    gm.meta["constants"] = {}
    for number, node in enumerate(gm.graph.nodes):
        if node.op == "placeholder":
            spec = specs[node.name]
            node.meta["role"] = KINDS[spec.kind.name]
            if node.meta["role"] == "input":
                node.meta["input"] = node.name
            else:
                node.meta["fqn"], node.meta["number"] = spec.target, number
            if node.meta["role"] == "constant":
                gm.meta["constants"][spec.target] = ep.constants[spec.target]
    last = next(iter(reversed(gm.graph.nodes)))
    gm.meta["outputs"] = [{"name": f"out{i}", "kind": "output", "target": ""} for i in range(len(last.args[0]))]
    gm.meta["symbols"] = _symbols(gm, dims or {}, model)
    return gm


def _symbols(gm: fx.GraphModule, dims: Any, model: nn.Module) -> dict:
    if isinstance(dims, tuple):
        dims = dict(zip(inspect.signature(model.forward).parameters, dims, strict=False))
    found = {}
    for node in gm.graph.nodes:
        for dim, named in (dims.get(node.name) or {}).items() if node.op == "placeholder" else ():
            found[named.__name__] = node.meta["val"].shape[dim].node.expr
    return found


def run_graph(gm: fx.GraphModule, model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple:
    """Outputs of the graph on the model's own tensors and named inputs, node by node."""
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return Interpret(gm, held | gm.meta["constants"]).run_named(inputs)


def gradients(outputs: Any, model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random combination of all float outputs, by parameter name."""
    torch.manual_seed(seed)
    total = sum(
        (out * torch.randn(out.shape, dtype=out.dtype)).sum()
        for out in outputs
        if isinstance(out, torch.Tensor) and out.requires_grad
    )
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    grads = torch.autograd.grad(total, [model.get_parameter(name) for name in names], allow_unused=True)
    return {name: grad for name, grad in zip(names, grads, strict=True) if grad is not None}


def assert_same(
    gm: fx.GraphModule, model: nn.Module, inputs: dict[str, torch.Tensor], tolerance: float = 1e-10
) -> None:
    """The graph and the model give the same outputs, gradients and buffer updates on real tensors."""
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    wanted = flat_tensors(twin(**inputs))
    torch.manual_seed(1)
    got = run_graph(gm, model, inputs)
    kinds = [entry["kind"] for entry in gm.meta["outputs"]]
    plain = [value for value, kind in zip(got, kinds, strict=True) if kind != "mutation"]
    assert len(plain) == len(wanted)
    for a, b in zip(plain, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    if any(value.requires_grad for value in wanted):
        mine, theirs = gradients(plain, model), gradients(wanted, twin)
        assert list(mine) == list(theirs)
        for name in mine:
            torch.testing.assert_close(
                mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )
    buffers = dict(twin.named_buffers())
    for value, entry in zip(got, gm.meta["outputs"], strict=True):
        if entry["kind"] == "mutation":
            torch.testing.assert_close(value, buffers[entry["target"]], rtol=tolerance, atol=tolerance)


def flat_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def check_values(gm: fx.GraphModule) -> None:
    """Every call's recorded value has the sizes and dtype that running its op on fake values gives."""
    for node in edit.calls(gm):
        fresh = pytree.tree_leaves(edit.infer(node))
        for a, b in zip(fresh, pytree.tree_leaves(node.meta["val"]), strict=True):
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype, node
                assert [facts.as_size(x, gm) for x in a.shape] == [facts.as_size(x, gm) for x in b.shape], node


def targets(gm: fx.GraphModule) -> list[str]:
    """Targets of all calls of the graph, in order."""
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
