"""The rule table: how every operator may be split on one mesh axis. One row per operator, one file per family.

An operator without a row is replicated: every rank computes it whole. For one of torch itself a rule may be derived
from trials, and for another where the user asks for that; what other operators do on sizes and values that were not
tried nobody knows. `unknown` lists those without a row for the user to see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.library import CustomOpDef

from autopar._torch import OpOverload, OpOverloadPacket
from autopar.errors import RuleError
from autopar.rules import (
    contractions,
    experts,
    factories,
    indexing,
    linalg,
    losses,
    pointwise,
    recurrent,
    reductions,
    spectral,
    views,
    vision,
)
from autopar.rules.arguments import replicated
from autopar.rules.derive import derive
from autopar.rules.language import Call, Option, parse
from autopar.rules.rule import Rule

RULES: dict[Any, Rule] = {
    **contractions.RULES,
    **experts.RULES,
    **factories.RULES,
    **indexing.RULES,
    **linalg.RULES,
    **losses.RULES,
    **pointwise.RULES,
    **recurrent.RULES,
    **reductions.RULES,
    **spectral.RULES,
    **views.RULES,
    **vision.RULES,
}

WHOLE = Rule(replicated)
"""What an operator without a row gets."""


DERIVE = "derive"
"""What a user gives as a rule to have one derived."""

TORCH = ("aten", "prims")
"""Namespaces of torch's own operators."""


def rule_for(target: Any, rules: Mapping[Any, Rule] | None = None) -> Rule | None:
    """The row of an operator; the user's own rows come first. None where there is none, or it is to be derived."""
    rule = (rules or {}).get(target) or RULES.get(target)
    return None if rule is not None and rule.spec == DERIVE else rule


def options_for(
    call: Call, ways: int, *, sections: Sequence[tuple[int, ...]] = (), rules: Mapping[Any, Rule] | None = None
) -> list[Option]:
    """Everything that `call` can do on one axis of `ways` ranks, by the user's rule, the table's, or one that can be
    derived where that is done; replicated where there is none."""
    rule = rule_for(call.target, rules) or _derived(call, rules) or WHOLE
    found = rule.options(call, ways, sections=sections)
    if call.target in (rules or {}):
        _check_runs(rule, call, ways, found)
    return found


def _check_runs(rule: Rule, call: Call, ways: int, found: Sequence[Option]) -> None:
    """Raise RuleError where a user's rule names a runtime algorithm that is not one of its operator."""
    own = {option.run for option in RULES.get(call.target, WHOLE).options(call, ways)} - {""}
    if wrong := sorted({option.run for option in found} - own - {""}):
        known = (
            f"those that do are {', '.join(sorted(own))}"
            if own
            else "none does: a factor that shards alone do not compute stays whole (f!)"
        )
        raise RuleError(
            f"rule {rule.text(call)!r} for {call.target}: runtime algorithm {wrong[0]!r} does not split this operator; "
            f"{known}"
        )


def _derived(call: Call, rules: Mapping[Any, Rule] | None) -> Rule | None:
    """The rule that is derived for a call without a row, for an operator of torch or where the user asks for it."""
    return (
        derive(call)
        if call.target in (rules or {}) or (isinstance(call.target, OpOverload) and call.target.namespace in TORCH)
        else None
    )


def unknown(targets: Iterable[Any], rules: Mapping[Any, Rule] | None = None) -> list[Any]:
    """Targets without a row, each once, in order."""
    return [t for t in dict.fromkeys(targets) if rule_for(t, rules) is None]


def derived(calls: Iterable[Call], rules: Mapping[Any, Rule] | None = None) -> dict[Any, str]:
    """Targets without a row that `options_for` splits all the same, with the rule that was derived for them."""
    found: dict[Any, str] = {}
    for call in calls:
        if rule_for(call.target, rules) is None and (rule := _derived(call, rules)) is not None:
            found.setdefault(call.target, rule.text(call))
    return found


def as_rules(rules: Mapping[Any, Any] | None) -> dict[Any, Rule]:
    """What a user gives as `rules=`: operator -> rule string, Rule or "derive", for all overloads where the operator is
    named without one and those have no rule of their own. Raises RuleError on anything else."""
    found: dict[Any, Rule] = {}
    for key, rule in (rules or {}).items():
        named = found if isinstance(key, OpOverloadPacket) else {}
        found.update({target: _as_rule(key, rule) for target in _targets(key) if target not in named})
    return found


def _targets(key: Any) -> list[Any]:
    """The operators that a key of `rules=` names, as graphs have them."""
    if isinstance(key, OpOverloadPacket):
        return [getattr(key, overload) for overload in key.overloads()]
    if isinstance(key, CustomOpDef):
        return [key._opoverload]
    if not isinstance(key, OpOverload) and not (callable(key) and key in RULES):
        raise RuleError(
            f"rules= has the key {key!r}, a {type(key).__name__}, wanted an operator: torch.ops.mylib.scale.default, "
            "torch.ops.mylib.scale for all its overloads, or what torch.library.custom_op gave"
        )
    return [key]


def _as_rule(key: Any, rule: Any) -> Rule:
    if isinstance(rule, str):
        if rule != DERIVE:
            parse(rule)
        return Rule(rule)
    if not isinstance(rule, Rule):
        raise RuleError(
            f"rule for {key} is {type(rule).__name__}, wanted a rule string such as 'b d -> b d', a Rule, or {DERIVE!r}"
        )
    return rule


def unused(targets: Iterable[Any], rules: Mapping[Any, Rule] | None) -> list[Any]:
    """Operators with a rule of the user's that no node of a graph with these targets calls, by any of the overloads
    that have one."""
    called = {_packet(target) for target in targets if target in (rules or {})}
    return list(dict.fromkeys(_packet(target) for target in (rules or {}) if _packet(target) not in called))


def _packet(target: Any) -> Any:
    return target.overloadpacket if isinstance(target, OpOverload) else target
