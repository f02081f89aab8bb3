"""What an emitted model says of itself, against the captured model: its state, inputs and outputs, modes. No value of a
step depends on these tables, so that none shows an error in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import fx

from autopar.runtime import PipelinedModule, ShardedModule
from autopar.runtime.declare import Declarations
from passes import edit, facts
from passes.grads import needs_grad

if TYPE_CHECKING:
    from autopar.verify.case import Case

Tables = dict[str, Any]
"""Table -> what it says, in plain data."""
LONGEST = 100  # characters that a message takes of a table
BEFORE = 40  # of them in front of the first difference


def said(model: type[ShardedModule]) -> Tables:
    """What the class of an emitted model says. STATE: its parameters and buffers in the order of the state dict, with
    (persistent, trainable)."""
    scopes: Any = model.STAGES if issubclass(model, PipelinedModule) else (model,)
    stated = Declarations.together([Declarations.stated(scope) for scope in scopes])
    state = {
        name: (about.info.persistent, about.info.trainable and not about.buffer)
        for name in stated.names(model.ALIASES, model.ORDER)
        for about in [stated.found[model.ALIASES.get(name, name)]]
    }
    return {
        "ORDER": [name for name, (persistent, _) in state.items() if persistent],
        "STATE": dict(sorted(state.items())),
        "INPUTS": list(model.INPUTS),
        "OUTPUTS": [kind for kind, _ in model.OUTPUTS],
        "UNGRADED": list(model.UNGRADED),
        "SAMPLE": dict(model.SAMPLE),
        "DIMS": dict(model.DIMS),
        "SIZES": dict(model.SIZES),
        "TRAINS": model.TRAINS,
        **{name: getattr(model, name) for name in ("STRUCTURE", "FIXED", "NESTED", "NORMS", "UNEVALUATED")},
        "CHANGING": list(model.CHANGING),
    }


def wanted(case: Case) -> Tables:
    """What it is to say of the captured model; no entry where that does not know."""
    gm, names = case.gm, case.names
    inputs = dict(zip(names.inputs, (n for n in gm.graph.nodes if n.meta.get("role") == "input"), strict=True))
    spans = {name: span for name, span in facts.spans(gm).items() if span != (0, None, 1)}
    state = dict(_state(case))
    return {
        **({"ORDER": [name for name in names.order if name in state]} if names.order else {}),
        "STATE": dict(sorted(state.items())),
        "INPUTS": list(names.inputs),
        "OUTPUTS": [about["kind"] for about in gm.meta["outputs"]],
        "UNGRADED": _ungraded(gm, case) if case.training else [],
        "SAMPLE": {name: _planned(node, case.plan.hints) for name, node in inputs.items()},
        "DIMS": {name: tuple(map(_dim, facts.shape(node))) for name, node in inputs.items()},
        "SIZES": spans,
        "TRAINS": case.training,
        "STRUCTURE": names.structure,
        "FIXED": dict(names.fixed),
        "NESTED": dict(names.nested),
        **({"NORMS": dict(names.momenta), "UNEVALUATED": names.unevaluated} if case.training else {}),
        "CHANGING": list(names.changing) if case.training else [],
    }


def differing(case: Case, model: type[ShardedModule]) -> list[str]:
    """The tables of an emitted `model` that say something else than the captured one, and what."""
    got = said(model)
    # as text: numbers that are not (nan) differ from themselves
    texts = {name: (repr(got[name]), repr(value)) for name, value in wanted(case).items()}
    return [f"{name} says {_from_difference(text, other)}" for name, (text, other) in texts.items() if text != other]


def _from_difference(text: str, other: str) -> str:
    """What `text` says where it begins to differ from `other`, and what that says there."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    begin = max(0, same - BEFORE)
    return " and not ".join(
        each if len(each) <= LONGEST else f"...{each[begin : begin + LONGEST]}..." for each in (text, other)
    )


def _state(case: Case) -> Iterator[tuple[str, tuple[bool, bool]]]:
    held = {
        name: (node.meta["role"] != "constant" and name not in case.names.fleeting, facts.is_trained(node))
        for node in edit.nodes(case.gm)
        if node.meta.get("role") in ("param", "buffer", "constant")
        for name in node.meta.get("fqns") or [node.meta["fqn"]]
    }
    yield from held.items()
    yield from ((alias, held[name]) for alias, name in case.names.aliases.items() if name in held)


def _ungraded(gm: fx.GraphModule, case: Case) -> list[int]:
    """The numbers of outputs with a gradient on one device of which the ranks have none: a step gives that of the loss
    alone, and the forward of a pipeline none."""
    kinds = [about["kind"] for about in gm.meta["outputs"] if about["kind"] != "mutation"]
    given = list(zip(edit.results(gm), kinds, strict=True))
    graded = needs_grad(gm)
    losses = {node for node, kind in given if kind == "loss" and not case.plan.pipelined}
    return [number for number, (node, _) in enumerate(given) if graded[node] and node not in losses]


def _planned(node: fx.Node, hints: Any) -> tuple[tuple[int, ...], str]:
    """The sizes that an input is planned for, and its dtype."""
    sizes = tuple(
        size if isinstance(size, int) else int(size.subs({s: hints[str(s)] for s in size.free_symbols}))
        for size in facts.shape(node)
    )
    return sizes, str(facts.value(node).dtype).removeprefix("torch.")


def _dim(size: facts.Size) -> int | str | None:
    """A size as DIMS says it: a number, the name of a symbol, or None for a formula of symbols."""
    return size if isinstance(size, int) else str(size) if size.is_Symbol else None
