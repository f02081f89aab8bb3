"""Runs a captured graph on real tensors on one device, folded blocks instance by instance. Used by verify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx

from passes.fold_repeats import body_of, targets


class Interpret(fx.Interpreter):
    """Single-device meaning of a captured graph.

    `weights` holds parameters, buffers and constants by fqn; `run_named(inputs)` runs with user inputs by name, after
    which `changed` holds the new values of buffers by fqn, those of all instances of blocks included. Raises KeyError
    for a weight or an input that is missing.
    """

    def __init__(self, gm: fx.GraphModule, weights: Mapping[str, Tensor]) -> None:
        super().__init__(gm)
        self.weights = weights
        self.changed: dict[str, Tensor] = {}

    def run_named(self, inputs: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """Outputs of the graph, in the order of `gm.meta["outputs"]`."""
        holders = [node for node in self.module.graph.nodes if node.op == "placeholder"]  # type: ignore[union-attr]
        values = [
            inputs[node.meta["input"]] if node.meta["role"] == "input" else self.weights[node.meta["fqn"]]
            for node in holders
        ]
        found = tuple(self.run(*values))
        module = self.module
        assert isinstance(module, fx.GraphModule)
        pairs = zip(found, module.meta["outputs"], strict=True)
        self.changed.update((entry["target"], value) for value, entry in pairs if entry["kind"] == "mutation")
        return found

    def run_node(self, node: fx.Node) -> Any:
        """One node; a folded one runs its body `meta["repeat"]` times, each time with the weights of that instance."""
        if node.op != "call_module":
            return super().run_node(node)
        args, _ = self.fetch_args_kwargs_from_env(node)
        body = body_of(node)
        holders = [holder for holder in body.graph.nodes if holder.op == "placeholder"]
        names = [holder.meta["fqns"] for holder in holders[len(args) :]]
        carried, invariant = args[: len(node.meta["val"])], args[len(node.meta["val"]) :]
        for number in range(node.meta["repeat"]):
            own = [self.weights[fqns[number]] for fqns in names]
            gave = self.body(body, str(node.target)).run(*carried, *invariant, *own)
            carried = gave[: len(carried)]
            self.changed.update(
                (names[number], value) for names, value in zip(targets(body), gave[len(carried) :], strict=True)
            )
        return carried

    def body(self, body: fx.GraphModule, name: str) -> Interpret:
        """The interpreter of one folded block, called `name`."""
        return Interpret(body, self.weights)
