"""Plans whose blocks are run again: by level, for every run of a graph; and what is there only then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from autopar.plan import Plan
from autopar.problem.build import Model
from autopar.problem.read_graph import read
from autopar.problem.rerun import heavy, keepable
from tests.helpers.verify import Subject

LEVELS = ("none", "selective", "full", "all")


def rematerialised(who: Subject, made: Plan, level: str) -> Plan:
    """`made` with every run of blocks at one level; "all" keeps whatever can be kept, "random <seed>" some of it."""
    if level == "none":
        return made
    program = read(who.captured.gm, made.hints, training=True, device="cpu")
    if level.startswith("random"):
        drawn = random.Random(int(level.removeprefix("random")))
        return replace(
            made,
            remat={
                scope: tuple(
                    op.name
                    for op in program.ops.values()
                    if op.scope == scope and keepable(op) and drawn.random() < 0.4
                )
                for scope in program.runs
            },
        )
    wanted = {"selective": heavy, "full": lambda op: False, "all": keepable}[level]
    return replace(
        made,
        remat={
            scope: tuple(op.name for op in program.ops.values() if op.scope == scope and wanted(op))
            for scope in program.runs
        },
    )


def in_part(made: Plan) -> Plan:
    """A rematerialised plan of which each stage runs the first of its instances again only, and the last stage none."""
    last = len(made.stages) - 1
    stages = [
        replace(stage, again={scope: int(last == 0 or index < last) for scope in made.remat})
        for index, stage in enumerate(made.stages)
    ]
    return replace(made, stages=tuple(stages))


def live(made: Model, choice: Sequence[int]) -> float:
    """Bytes that are there only while a block is run again."""
    found = sum(
        float(node.live_bytes[c])
        for node, c in zip(made.problem.nodes, choice, strict=True)
        if node.live_bytes is not None
    )
    for net in made.problem.nets:
        if net.live_bytes is not None:
            columns = {int(use.column[choice[use.node]]) for use in net.uses}
            found += sum(float(net.live_bytes[net.row[choice[net.producer]], column]) for column in columns)
    return found
