"""Microbatches as one more mesh axis, in time instead of space.

To cut a step into n microbatches is data parallelism over n ranks that run one after the other. So the rules of the
operators say how microbatches share each value: it is split by samples (`S0`), a partial sum (`P`) or the same for all
(`R`). A gradient that is partial over microbatches adds up by accumulation. A collective in the middle of the model is
not possible, because the other microbatches have not run yet, but for two kinds of sum: results of the model (the
loss), which are added up at the end, and sums that depend on inputs alone (the number of tokens that count), which are
taken over the whole batch before the first microbatch: the *totals*. A model that needs another sum over the batch
(batch statistics, a balance loss) computes something else on microbatches than on the batch; it is refused, with the
operator's name.

A value that is the same for all microbatches (a penalty of weights, a learned uncertainty, a total) may be added to a
partial sum: it is *shared*, each of n microbatches adds 1 / n of it, so that it and its gradients count once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autopar._torch import OpOverload
from autopar.errors import PlanError
from autopar.layout import is_shard
from autopar.problem.graph import Op, Program, Ref
from autopar.rules import RULES
from autopar.rules.language import Option

REGROUPS = torch.ops.aten.reshape.default
"""The operator that makes groups of samples."""


@dataclass(frozen=True)
class Microbatching:
    """How microbatches share the values of a program.

    entries   operator -> the layout of each output on the axis of microbatches
    totals    values (`op`, or `op:output`) that are computed on the whole batch before the first microbatch
    shared    operands (`op:number`) of which each of n microbatches takes 1 / n
    """

    entries: Mapping[str, tuple[str, ...]]
    totals: tuple[str, ...]
    shared: tuple[str, ...] = ()


def microbatching(program: Program, options: Mapping[str, Option], count: int) -> Microbatching:
    """How `count` microbatches share the values of `program`, from `options`: the option of each operator on an axis of
    `count` ranks that split the batch.

    Raises PlanError, which names the operator, where a microbatch would need values of the others, or `count` does not
    divide the batch.
    """
    totals, shared = dict[Ref, None](), dict[str, None]()
    of_inputs = from_inputs(program)
    for op in program.ops.values():
        for index, ref in enumerate(op.operands):
            made, wanted = options[ref[0]].outs[ref[1]].value, options[op.name].ins[index].value
            if made == wanted or op.role in ("loss", "output") or count == 1:
                continue
            if wanted == "R" and made == "P" and ref[0] in of_inputs and not op.scope:
                totals[ref] = None
            elif _is_shared(program, ref, made, wanted):
                shared[f"{op.name}:{index}"] = None
            else:
                raise PlanError(_refusal(program, op, ref, made, wanted, count))
    shared |= _shared_totals(program, totals, options, count)
    for run in program.runs.values():
        shared |= {
            f"{port}:0": None
            for port, ref in zip(run.ports, run.feeds, strict=True)
            if _is_shared(program, ref, options[ref[0]].outs[ref[1]].value, options[port].ins[0].value)
        }
        _check_run(program, run.ports, run.feeds, options, count, shared)
        if run.count > 1:
            _check_run(program, run.ports[: len(run.carried)], run.carried, options, count)
    _check_cut(program, options, count)
    entries = {op.name: tuple(use.value for use in options[op.name].outs) for op in program.ops.values()}
    for name, index in totals:
        entries[name] = tuple("R" if i == index else e for i, e in enumerate(entries[name]))
    return Microbatching(
        entries, tuple(name if index == 0 else f"{name}:{index}" for name, index in totals), tuple(shared)
    )


def _is_shared(program: Program, ref: Ref, made: str, wanted: str) -> bool:
    """Whether a value that is made as `R` is wanted as `P`, and can be divided by the number of microbatches: integers
    cannot."""
    return made == "R" and wanted == "P" and program.ops[ref[0]].call.outs[ref[1]].floating


def _shared_totals(
    program: Program, totals: Iterable[Ref], options: Mapping[str, Option], count: int
) -> dict[str, None]:
    """The operands (`op:number`) that read a total as `P`. All microbatches have the same total, so that each takes its
    part of it. Raises PlanError for totals that are integers."""
    found: dict[str, None] = {}
    for ref in totals:
        readers = [(op, index) for op, index in program.readers.get(ref, ()) if op.role == "op"]
        for op, index in [*readers, *((program.ops[port], 0) for port in program.fed.get(ref, ()))]:
            if options[op.name].ins[index].value == "P":
                if not _is_shared(program, ref, "R", "P"):
                    raise PlanError(_refusal(program, op, ref, "R", "P", count))
                found[f"{op.name}:{index}"] = None
    return found


def of_parts(whole: Microbatching, program: Program, origin: Callable[[str], str]) -> Microbatching:
    """`whole`, which is for an undivided program, for `program`, in which runs of blocks are divided into parts
    (passes.part_runs). `origin`: name of an operator of `program` -> its name in the undivided one. A port that takes
    the result of the part before it is not shared, as a carried value is not."""
    entries = {name: whole.entries[origin(name)] for name in program.ops}
    operands: dict[str, list[str]] = {}
    for text in whole.shared:
        operands.setdefault(text.rpartition(":")[0], []).append(text.rpartition(":")[2])
    feeds = {port: ref for run in program.runs.values() for port, ref in zip(run.ports, run.feeds, strict=True)}
    shared = [
        f"{name}:{number}"
        for name in program.ops
        for number in operands.get(origin(name), ())
        if name not in feeds or entries[feeds[name][0]][feeds[name][1]] == "R"
    ]
    return replace(whole, entries=entries, shared=tuple(shared))


def _check_cut(program: Program, options: Mapping[str, Option], count: int) -> None:
    """Raises PlanError where `count` does not divide the batch, or the loss is not the sum of those of microbatches."""
    for op in program.ops.values():
        if op.samples is not None and (batch := op.call.outs[0].sizes[op.samples]) % count:
            raise PlanError(
                f"input {op.name}: a batch of {batch} does not divide into {count} microbatches; use fewer, or another "
                "batch"
            )
        if op.role == "loss" and (made := options[op.operands[0][0]].outs[op.operands[0][1]].value) != "P":
            raise PlanError(
                f"{op.operands[0][0]} ({program.ops[op.operands[0][0]].where}): the loss is {made} across {count} "
                "microbatches, wanted a sum of theirs; use one microbatch"
            )


def from_inputs(program: Program) -> dict[str, None]:
    """Names of the operators outside of blocks whose results depend on inputs, buffers, constants and sizes alone.
    Random draws are left out: one for the whole batch would differ from those of microbatches."""
    found: dict[str, None] = {}
    for op in program.ops.values():
        plain = op.role in ("input", "buffer", "constant") or (op.role == "op" and not op.scope and not op.draws)
        if plain and all(ref[0] in found for ref in op.operands) and not op.graded:
            found[op.name] = None
    return found


def ancestors(program: Program, refs: Sequence[Ref]) -> dict[str, None]:
    """Names of all operators that `refs` depend on, those of inputs and `refs` themselves included, in program
    order."""
    queue, found = [ref[0] for ref in refs], dict[str, None]()
    while queue:
        name = queue.pop()
        if name not in found:
            found[name] = None
            queue += [ref[0] for ref in program.ops[name].operands]
    return {name: None for name in program.ops if name in found}


def _check_run(
    program: Program,
    ports: Sequence[str],
    feeds: Sequence[Ref],
    options: Mapping[str, Option],
    count: int,
    shared: Container[str] = (),
) -> None:
    """Raises PlanError where microbatches share a value that is fed to a port in another way than the port itself."""
    for port, ref in zip(ports, feeds, strict=True):
        made, wanted = options[ref[0]].outs[ref[1]].value, options[port].ins[0].value
        if made != wanted and f"{port}:0" not in shared:
            raise PlanError(_refusal(program, program.ops[port], ref, made, wanted, count))


def _refusal(program: Program, op: Op, ref: Ref, made: str, wanted: str, count: int) -> str:
    """The message for an operator that reads `ref`, made as `made` over microbatches, as `wanted`."""
    source, elsewhere = program.ops[ref[0]], ""
    if made == "P":
        what = "needs the sum over the whole batch of"
    elif is_shard(made) and not is_shard(wanted):
        what, elsewhere = "needs all samples of the batch together of", _elsewhere(program)
    else:
        what = f"wants as {wanted} what microbatches have as {made}:"
    rule = (
        ""
        if op.target in RULES or not isinstance(op.target, OpOverload)
        else f", or with rules= give {op.target} a rule by which samples are apart, if they are"
    )
    groups = (
        ", fewer microbatches or a larger batch, if these are groups of samples, of which each is to have whole ones"
        if op.target is REGROUPS
        else ""
    )
    return (
        f"{op.name} ({op.where}) {what} {ref[0]} ({source.where}), so {count} microbatches would not compute what the "
        f"batch computes; use one microbatch{groups}, or a model whose loss is a sum or mean over samples{rule}"
        f"{elsewhere}"
    )


def _elsewhere(program: Program) -> str:
    """What to do where dim 0 of the inputs, which was taken for the samples, is none (sequences first); empty where no
    other dim can be."""
    inputs = [op for op in program.ops.values() if op.samples is not None]
    tables = [op for op in inputs if len(op.call.outs[0].shape) > 1]
    if any(op.samples for op in inputs) or len({op.call.outs[0].sizes[1] for op in tables}) != 1:
        return ""
    named = {op.node.meta.get("input", op.name): {1: "b"} for op in tables}
    return (
        f". Dim 0 of the inputs was taken for the samples: where dim 1 has them (sequences first), name that: "
        f"dynamic_shapes={named}"
    )
