"""Errors of torch.export, rewritten for the user: sizes by their names, and the user's own source line. Called by
export."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from autopar.capture._torch import export_errors
from autopar.capture.devices import on_meta
from autopar.capture.dims import Dims
from autopar.capture.known_masks import KnownMasks
from autopar.capture.lines import source
from autopar.capture.mask_branches import Picking
from autopar.capture.outer_code import fake
from autopar.capture.valueless import valueless
from autopar.errors import CaptureError
from passes import edit, facts

_GUARD = re.compile(r"satisfy the generated guard (.+?)\.?$", re.M)
_SIZE = re.compile(r"(\w+) = (L\[[^=]*?\.size\(\)\[\d+\])")  # b = L['x'].size()[0]
_BULLET = re.compile(r"^\s*-\s+(.+)$", re.M)
_NUMBER = re.compile(r"You marked (\w+) as dynamic but your code specialized it to be a constant")
_NUMBERS = "int(), a loop over positions, a key of a cache, a library that wants plain sizes"
# with an address in memory behind it
_UNTRACKED = re.compile(r"^(.+?) \(<class 'torch\.SymInt'>, \d+\)\s*is not tracked with proxy")
_NO_SPAN = "Cannot create Dim with inconsistent"
_FROM_VALUES = "data-dependent"
_NO_VALUES = "meta"  # in torch's errors on tensors without values: `item() cannot be called on meta tensors`
# the whole text of torch's error on an operator whose result has sizes that depend on values
_AN_OPERATOR = re.compile(r"(aten\.\w+\.\w+)")
_TO_NUMBER = "Could not extract specialized integer"
_BY_CHANCE = re.compile(r"layer_?drop", re.I)
# advice for sizes that depend on values, and for such repeats
_WHOLE = (
    "compute all rows and take those with torch.where or a product with the mask, pick a fixed number of them (topk), "
    "or pass what is picked as an input"
)
_SAID = (
    "say how many rows there are in all, repeat_interleave(..., output_size=number), where they are as many in every "
    "step"
)
_SPECIAL = (
    (
        re.compile(r"PackedSequence|pack_padded"),
        "packed sequences have as many rows as their lengths say, and a graph has the sizes of its inputs: give the "
        "recurrent layer the padded sequences and leave out of the loss what is behind each end; its backward "
        "direction is a layer of its own on sequences that are reversed within their lengths (gather)",
    ),
    (
        re.compile(r"nested_tensor|NestedTensor"),
        "nested tensors have as many rows as their offsets say, and a graph has the sizes of its inputs: use padded "
        "tensors and a mask",
    ),
    (
        re.compile(r"expression (Eq|Ne)\(u\d+, u\d+\)"),
        "two sizes that depend on values need not be equal: of rows that masks pick, compute the mask once and use it "
        "for all of them (keep = y > 0; x[keep] - z[keep])",
    ),
)
"""(pattern, advice) for tensors whose sizes depend on values: what torch's error, or the line that makes such a tensor,
contains; and what to write instead."""
_IN_LIBRARY = {
    "/torch/ao/quantization/": (
        "modules of torch.ao.quantization that observe and quantise one after the other branch on what they have seen: "
        "use the fused ones, FusedMovingAvgObsFakeQuantize, which torch.ao.quantization.get_default_qat_qconfig has, "
        "and run the model on one batch before it is compiled"
    ),
}
"""What to write in place of modules of torch, by a part of the paths of their files."""
# operators whose number of results is given by a tensor
REPEATS = (torch.ops.aten.repeat_interleave.self_Tensor, torch.ops.aten.repeat_interleave.Tensor)
_ADVICE = "another size needs a capture of its own, with example inputs of that size"


def says(error: BaseException | None, dims: Dims, size: str = "") -> str:
    """The first line of the error. For violated constraints, the conditions that the model has on the sizes, `(4*b) ==
    (8*(b // 2))`; only those on `size` if there are any."""
    text = str(error)
    names = {place: name for name, place in _SIZE.findall(text)}
    guards = [_named(guard, names) for guard in _GUARD.findall(text)]
    if guards:
        wanted = next((guard for guard in guards if re.search(rf"\b{size}\b", guard)), guards[0]) if size else guards[0]
        return f"the model works only where {wanted.strip()}"
    lines = [
        line.strip()
        for line in (_BULLET.findall(text) if "Constraints violated" in text else text.splitlines())
        if line.strip()
    ]
    line = lines[0][:300] if lines else type(error).__name__
    if _NO_SPAN in line:
        line = "the model works only for some sizes (it divides them into equal parts, or compares them with others)"
    if number := _NUMBER.search(line):
        line = made_number(number.group(1))
    if untracked := _UNTRACKED.match(line):
        line = (
            f"torch loses the size {untracked[1]} where a function transform (torch.func.vmap, grad, jacrev) reads a "
            "tensor from outside; a product with another dim (einsum, matmul) keeps it"
        )
    if _FROM_VALUES in line:
        line = f"control flow or a size depends on the values of a tensor, which are not known ({line})"
    return re.sub(r"\bs\d+\b", next(iter(dims.hints)) if len(dims.hints) == 1 else "a symbolic size", line)


def made_number(size: str) -> str:
    """The text for a size that the model turns into a number."""
    return f"the model makes a number of {size} ({_NUMBERS})"


def of_values(error: BaseException) -> bool:
    """Whether an error says that control flow depends on values of tensors."""
    return _FROM_VALUES in str(error)


def made_numbers(error: BaseException) -> set[str]:
    """The sizes that the model turned into numbers, as far as torch's error names them."""
    return set(_NUMBER.findall(str(error)))


def advice(error: BaseException, place: str = "") -> str:
    """What to do about an error at line `place`. Plain Python errors come from the model's own code, which may take
    another branch when it is traced."""
    if _BY_CHANCE.search(place):
        return (
            "that leaves blocks out at random, and a graph has the same blocks in every step: set it to 0 (the "
            "config's layerdrop, encoder_layerdrop, decoder_layerdrop), or scale what the blocks add (stochastic "
            "depth by multiplication)"
        )
    if (special := next((what for pattern, what in _SPECIAL if pattern.search(f"{error} {place}")), None)) is not None:
        return special
    paths = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if (
        special := next((what for part, what in _IN_LIBRARY.items() if any(part in path for path in paths)), None)
    ) is not None:
        return special
    if isinstance(error, (AttributeError, LookupError, TypeError)):
        return (
            "the model's own code fails there while it is traced: torch.compiler.is_compiling() is true then, and "
            "some models do not make what they are not given (masks, positions, caches); pass it as an input, or "
            "rewrite that line"
        )
    if (
        operator := _AN_OPERATOR.fullmatch(str(error).strip().splitlines()[0] if str(error).strip() else "")
    ) is not None:
        return (
            f"torch has no rule for what sizes {operator[1]} gives without the values of its operands, which a graph "
            "does not have: put the call behind a torch.library.custom_op with a register_fake and a backward of its "
            "own (then a rule in rules= says how it is split), or compile the model up to there and compute that of "
            "its outputs"
        )
    if _TO_NUMBER in str(error):
        return (
            "a number that is read off a tensor (int(), item(), a slice by one) changes from step to step, and a "
            "graph has none that do: keep it as a tensor and work with it as one (index_copy_ at positions "
            "(self.pointer + torch.arange(n)) % size writes a queue, torch.where with a mask takes a part); an int of "
            "Python would stay what it is now"
        )
    return (
        "rewrite that line without control flow on tensor values (torch.where for an if; a fixed size for one that "
        "depends on values), or pass what it computes as an input"
    )


def as_it_is(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    """The error that a model on meta raises when it is called untraced; None where it runs, or needs values of tensors.
    Its tensors are fake, so that code that checks for known values behaves as when it is traced."""
    with torch.no_grad(), valueless(), on_meta(), Picking(), KnownMasks(counting=True):
        args, kwargs = fake((args, kwargs))
        try:
            model(*args, **kwargs)
        except export_errors() as error:
            return None if _of_no_values(error) else error
    return None


def _of_no_values(error: Exception) -> bool:
    """Whether an error is about tensors without values (an operator without a meta kernel, a value that is asked for)
    and not about the model."""
    return (
        isinstance(error, NotImplementedError)
        or type(error).__module__.startswith("torch.")
        or _NO_VALUES in str(error)
    )


def described(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Inputs by name or number, tensors by dtype and sizes: `input_ids int64[8, 16], labels int64[8, 16]`."""
    named = [*((f"input {number}", value) for number, value in enumerate(args)), *kwargs.items()]
    return ", ".join(f"{name} {_described(value)}" for name, value in named) or "none"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def refuse_sizes_of_values(gm: fx.GraphModule, model: str) -> None:
    """Raise CaptureError, with the line, where the number of rows of a tensor depends on values."""
    known = set(facts.symbols(gm).values())
    for module in edit.graphs(gm):
        for node in (node for node in module.graph.nodes if "val" in node.meta):
            sizes = [facts.as_size(size, module) for tensor in facts.tensors(node) for size in tensor.shape]
            if other := {name for size in sizes for name in getattr(size, "free_symbols", ())} - known:
                raise CaptureError(
                    f"{model} cannot be captured: {facts.where(node)}: {node.name} has a size that depends on the "
                    f"values of a tensor ({', '.join(map(str, other))}: what a mask picks, nonzero, unique, repeats), "
                    f"and a graph has the sizes of its inputs: {_SAID if node.target in REPEATS else _WHOLE}"
                )


def why_static(error: BaseException | None, names: list[str], dims: Dims, model: nn.Module) -> str:
    """The note for dims that the model fixes."""
    place = source(error, model)
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} static: {says(error, dims)}"
        f"{f' {place}' if place.startswith('at ') else ''}; {_ADVICE}"
    )


def _named(guard: str, names: dict[str, str]) -> str:
    """A condition in the names of sizes, instead of torch's places of them."""
    for place, name in names.items():
        guard = guard.replace(place, name)
    return guard.replace("IntInfinity()", "infinity")
