"""Decisions of a search in the plain words of a plan file, and notes for the user on weights in tiles and operators
without a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.layout import fraction, parse
from autopar.plan import NodePlan, Plan
from autopar.problem.graph import Op, Program, Ref
from autopar.problem.pairs import LayoutPair
from autopar.problem.tiling import tiled
from autopar.recipes.kinds import kind
from autopar.rules import derived, unknown, unused
from autopar.rules.language import Use
from autopar.rules.rule import Rule
from autopar.rules.tiles import NAMES, OPERATORS


def node_plan(op: Op, options: Sequence[Any]) -> NodePlan:
    """What a Plan says of one node that has `options`, one per mesh axis."""

    def column(uses: Sequence[Use]) -> str:
        return str(LayoutPair.of_uses(tuple(uses)))

    ins = tuple(column([o.ins[i] for o in options]) for i in range(len(options[0].ins))) if options else ()
    outs = tuple(column([o.outs[i] for o in options]) for i in range(len(options[0].outs))) if options else ()
    return NodePlan(
        ins, outs, tuple(o.factor for o in options), tuple(kind(op, o) for o in options), tuple(o.run for o in options)
    )


def local_share(plan: Plan, ref: Ref) -> float:
    """The share of a value that one rank has where it is made."""
    value = plan.nodes[ref[0]].outs[ref[1]].split("|")[0]
    return fraction(parse(value), plan.mesh)


def tiling_notes(program: Program, plan: Plan) -> list[str]:
    """Which weights are gathered in tiles, if any are."""
    found = [
        f"{program.ops[program.following.get(ref, ref)].fqn or ref} in {count}"
        for name, count in tiled(plan.runs).items()
        for ref in [program.ops[name].operands[NAMES[OPERATORS[program.ops[name].target]]][0]]
    ]
    return (
        [f"too large to be gathered whole, gathered and used in tiles: {', '.join(dict.fromkeys(found))}"]
        if found
        else []
    )


RULES_OPTION = "rules={op: 'b d -> b d'} (--rules FILE.py)"
"""How users give rules, in Python and on the command line."""


def rule_notes(program: Program, rules: Mapping[Any, Rule] | None) -> list[str]:
    """What the user should know about operators without a rule, each once, with its first place in the model; and which
    rules no operator had."""
    ops = [op for op in program.ops.values() if op.role == "op"]
    found = derived((op.call for op in ops), rules)
    notes = []
    for target in unknown((op.target for op in ops), rules):
        op = next(op for op in ops if op.target == target)
        notes.append(
            f"no sharding rule for {target} at {op.where}: "
            f"{_without_rule(found.get(target), asked=target in (rules or {}))}"
        )
    if missed := unused((op.target for op in ops), rules):
        notes.append(f"rules for {', '.join(map(str, missed))} were not used: no operator of the graph is one of these")
    return notes


def _without_rule(text: str | None, *, asked: bool) -> str:
    """What is done with an operator that has no rule, or the one that was derived."""
    if text is not None:
        return (
            f"split by the rule {text!r}, derived: it held in trials on random tensors, which is no proof; "
            f"{RULES_OPTION} gives another"
        )
    said = f"computed whole on every rank; give it a rule with {RULES_OPTION}"
    return (
        f"{said} (none held in trials)"
        if asked
        else f'{said}, or "derive" to have one that holds in trials on random tensors (docs/writing-rules.md)'
    )
