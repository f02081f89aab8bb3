"""The rule table: how each operator may be split on one mesh axis. One row per operator, one file per family of
operators. The problem asks it for the options of each operator (`options_for`); `compile` for the user's own rules
(`as_rules`).

Of the other files, `language` parses rule strings, `rule` is a row, `matches` makes options of a rule string and a
call, `oracle` checks a rule by brute force, `derive` guesses rules, and `algorithms` has the splits that need a runtime
algorithm, with `site` for what their prices depend on.

An operator without a row is computed whole on every rank. For operators of torch itself a rule is derived by trials
(`derive`); for other operators only where the user asks for it, because trials cannot show what an operator does with
sizes and values that were not tried. `unknown` lists the operators without a row, for a note to the user."""

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

REPLICATED = Rule(replicated)
"""The rule of an operator without a row."""

DERIVE = "derive"
"""In place of a rule in `rules=`: derive one by trials."""

TORCH = ("aten", "prims")
"""Namespaces of torch's own operators."""


def rule_for(target: Any, rules: Mapping[Any, Rule] | None = None) -> Rule | None:
    """The row of an operator: the user's, or else the table's. None where there is none, or where the user asks to
    derive it."""
    rule = (rules or {}).get(target) or RULES.get(target)
    return None if rule is not None and rule.spec == DERIVE else rule


def options_for(
    call: Call, ways: int, *, sections: Sequence[tuple[int, ...]] = (), rules: Mapping[Any, Rule] | None = None
) -> list[Option]:
    """All options of `call` on a mesh axis of `ways` ranks, by the user's rule, else the table's, else a derived one
    (`_derived`), else "computed whole on every rank".

    `sections` are as in `matches.options`. Raises RuleError where the rule does not fit the call."""
    rule = rule_for(call.target, rules) or _derived(call, rules) or REPLICATED
    found = rule.options(call, ways, sections=sections)
    if call.target in (rules or {}):
        _check_runs(rule, call, ways, found)
    return found


def _check_runs(rule: Rule, call: Call, ways: int, found: Sequence[Option]) -> None:
    """Raise RuleError where a user's rule names a runtime algorithm that does not implement this operator."""
    own = {option.run for option in RULES.get(call.target, REPLICATED).options(call, ways)} - {""}
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
    """The derived rule of an operator without a row, if it is one of torch's or the user asks for it; None where no
    rule holds."""
    return (
        derive(call)
        if call.target in (rules or {}) or (isinstance(call.target, OpOverload) and call.target.namespace in TORCH)
        else None
    )


def unknown(targets: Iterable[Any], rules: Mapping[Any, Rule] | None = None) -> list[Any]:
    """The targets without a row, without repetition, in order of first occurrence."""
    return [t for t in dict.fromkeys(targets) if rule_for(t, rules) is None]


def derived(calls: Iterable[Call], rules: Mapping[Any, Rule] | None = None) -> dict[Any, str]:
    """The operators without a row that are split by a derived rule, each with the rule string for its first such
    call."""
    found: dict[Any, str] = {}
    for call in calls:
        if rule_for(call.target, rules) is None and (rule := _derived(call, rules)) is not None:
            found.setdefault(call.target, rule.text(call))
    return found


def as_rules(rules: Mapping[Any, Any] | None) -> dict[Any, Rule]:
    """The `rules=` argument of `compile` as a table: operator overload -> Rule.

    A key without an overload (`torch.ops.mylib.scale`) stands for all overloads that have no key of their own. Raises
    RuleError where a key is no operator or a value no rule."""
    found: dict[Any, Rule] = {}
    for key, rule in (rules or {}).items():
        named = found if isinstance(key, OpOverloadPacket) else {}
        found.update({target: _as_rule(key, rule) for target in _targets(key) if target not in named})
    return found


def _targets(key: Any) -> list[Any]:
    """The overloads, as they are called in graphs, that one key of `rules=` stands for."""
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
    """One value of `rules=` as a Rule. Raises RuleError for anything but a rule string, a Rule or DERIVE."""
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
    """The operators for which the user gave a rule that no call in `targets` uses, without repetition. A rule for
    several overloads is used if one of them is called."""
    called = {_packet(target) for target in targets if target in (rules or {})}
    return list(dict.fromkeys(_packet(target) for target in (rules or {}) if _packet(target) not in called))


def _packet(target: Any) -> Any:
    """The operator of an overload; other targets as they are."""
    return target.overloadpacket if isinstance(target, OpOverload) else target
