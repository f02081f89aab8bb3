"""The rule table: how every operator may be split on one mesh axis. One row per operator, one file per family.

An operator without a row is replicated: every rank computes it whole. `unknown` lists those for the user to see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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

RULES: dict[Any, Rule] = {**contractions.RULES, **experts.RULES, **factories.RULES, **indexing.RULES, **linalg.RULES, **losses.RULES, **pointwise.RULES,
                          **recurrent.RULES, **reductions.RULES, **spectral.RULES, **views.RULES, **vision.RULES}

WHOLE = Rule(replicated)
"""What an operator without a row gets."""


def rule_for(target: Any, rules: Mapping[Any, Rule] | None = None) -> Rule | None:
    """The row of an operator; the user's own rows come first."""
    return (rules or {}).get(target) or RULES.get(target)


def options_for(call: Call, ways: int, *, sections: Sequence[tuple[int, ...]] = (),
                rules: Mapping[Any, Rule] | None = None) -> list[Option]:
    """Everything that `call` can do on one axis of `ways` ranks, by the user's rule, the table's, or one that can be derived
    and proven; replicated where there is none."""
    rule = rule_for(call.target, rules) or derive(call) or WHOLE
    return rule.options(call, ways, sections=sections)


def unknown(targets: Iterable[Any], rules: Mapping[Any, Rule] | None = None) -> list[Any]:
    """Targets without a row, each once, in order."""
    return [t for t in dict.fromkeys(targets) if rule_for(t, rules) is None]


def derived(calls: Iterable[Call], rules: Mapping[Any, Rule] | None = None) -> dict[Any, str]:
    """Targets without a row that `options_for` splits all the same, with the rule that was derived for them."""
    found: dict[Any, str] = {}
    for call in calls:
        if rule_for(call.target, rules) is None and (rule := derive(call)) is not None:
            found.setdefault(call.target, rule.text(call))
    return found


def as_rules(rules: Mapping[Any, Any] | None) -> dict[Any, Rule]:
    """What a user gives as `rules=`: operator -> rule string or Rule. Raises RuleError on anything else."""
    found: dict[Any, Rule] = {}
    for target, rule in (rules or {}).items():
        if isinstance(rule, str):
            parse(rule)
            rule = Rule(rule)
        if not isinstance(rule, Rule):
            raise RuleError(f"rule for {target} is {type(rule).__name__}, wanted a rule string such as 'b d -> b d' or a Rule")
        found[target] = rule
    return found
