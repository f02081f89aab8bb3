"""The outputs of a captured model: which one is the loss, and which of them an emitted program can give. Called by
capture.capture."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx

from autopar.capture.asked import Asked
from autopar.errors import CaptureError
from passes import facts


def mark_loss(gm: fx.GraphModule) -> None:
    """The output called loss, or else the only scalar float, is the loss."""
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    entries = gm.meta["outputs"]
    scalars = [
        i
        for i, n in enumerate(output.args[0])
        if isinstance(n, fx.Node) and facts.is_tensor(n) and facts.is_float(n) and facts.numel(n) == 1
    ]
    named = [i for i in scalars if entries[i]["name"].rsplit(".", 1)[-1] == "loss"]
    chosen = named or (scalars if len(scalars) == 1 else [i for i in scalars if i == 0])
    if chosen:
        entries[chosen[0]] = {"name": "loss", "kind": "loss", "target": ""}


def check_loss(gm: fx.GraphModule, asked: Asked, left_out: Mapping[str, str]) -> None:
    """Raise CaptureError where a model that trains has no loss; `left_out` are outputs that the graph lacks, by
    name."""
    if asked.mode == "train" and not any(entry["kind"] == "loss" for entry in gm.meta["outputs"]):
        others = "".join(
            f"; {name} {what}, into which nobody looks (return a dict, a tuple or a dataclass)"
            for name, what in left_out.items()
        )
        todo = (
            "pass labels among the inputs, or loss_fn=, or mode='inference' "
            "(on the command line: a factory whose model gives the loss, or --mode inference)"
            if asked.loss_fn is None
            else "loss_fn wants to return one number as a tensor of a floating dtype, the mean or the sum of its losses"
        )
        found = ", ".join(_outputs(gm))
        got = f"outputs {found}" if found else "no outputs"
        raise CaptureError(f"{asked.name} gives no scalar loss in train mode, got {got}{others}: {todo}")


def _outputs(gm: fx.GraphModule) -> Iterator[str]:
    """The outputs of a graph by name, dtype and sizes: `logits float32[b, 10]`."""
    (output,) = [n for n in gm.graph.nodes if n.op == "output"]
    for node, entry in zip(output.args[0], gm.meta["outputs"], strict=True):
        if entry["kind"] == "output" and isinstance(node, fx.Node) and facts.is_tensor(node):
            dtype = str(node.meta["val"].dtype).removeprefix("torch.")
            yield f"{entry['name']} {dtype}[{', '.join(map(str, facts.shape(node)))}]"


def other_outputs(left_out: Mapping[str, str], structure: Any) -> Iterator[str]:
    """Notes of outputs that the sharded module gives otherwise than the model does."""
    yield from (f"output {name} {what}: it is None in the sharded module" for name, what in left_out.items())
    yield from (
        f"the model returns a {name}: it is a plain tuple in the sharded module ({', '.join(fields)}, in this order)"
        for name, fields in dict(_named_tuples(structure)).items()
    )
    yield from (
        f"the model returns a dict with the key {key!r}, a {type(key).__name__}, which an emitted file cannot write: "
        f"it is the text {written_key(key)!r} in the sharded module"
        for key in _keys(structure)
        if written_key(key) != key
    )


def plain(structure: Any) -> Any:
    """The user's pytree as plain dicts, lists and numbers: what an emitted file can say. Keys are equal to the user's
    where they can be written, else texts. Raises CaptureError on nodes that are none of these, and where two keys of a
    dict would be the same text."""
    if isinstance(structure, Mapping):
        keys: dict[Any, Any] = {}
        for key in structure:
            if written_key(key) in keys:
                raise CaptureError(
                    f"the model returns a dict with the keys {keys[written_key(key)]!r} and {key!r}, which are both "
                    f"{written_key(key)!r} in an emitted file: give them keys that are other texts or numbers"
                )
            keys[written_key(key)] = key
        return {written_key(key): plain(value) for key, value in structure.items()}
    if isinstance(structure, (tuple, list)):
        return tuple(plain(v) for v in structure)
    if structure is not None and not isinstance(structure, (bool, int, str)):
        raise CaptureError(
            f"the model returns a {type(structure).__name__}, which torch flattens and an emitted program cannot make "
            "again: return its tensors in a dict, a tuple or a dataclass"
        )
    return structure


def _named_tuples(structure: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and fields of the named tuples in the user's pytree."""
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        yield type(structure).__name__, structure._fields
    if isinstance(structure, (Mapping, tuple, list)):
        for item in structure.values() if isinstance(structure, Mapping) else structure:
            yield from _named_tuples(item)


def _keys(structure: Any) -> Iterator[Any]:
    """All keys of dicts in the user's pytree."""
    if isinstance(structure, Mapping):
        yield from structure
    if isinstance(structure, (Mapping, tuple, list)):
        for item in structure.values() if isinstance(structure, Mapping) else structure:
            yield from _keys(item)


def written_key(key: Any) -> Any:
    """A key of a dict as a literal that is equal to it (members of `IntEnum` are equal to their numbers), or as text
    where no literal is."""
    if isinstance(key, tuple):
        parts = tuple(map(written_key, key))
        return parts if parts == key else str(key)
    if key is None or isinstance(key, bool):
        return key
    if isinstance(key, float) and not math.isfinite(key):
        return str(key)
    return next((made(key) for kind, made in _PLAIN.items() if isinstance(key, kind)), str(key))


_PLAIN: Mapping[type, Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes,
}
"""Makes of a key, which may be a member of an enumeration, a plain one that is equal to it."""
