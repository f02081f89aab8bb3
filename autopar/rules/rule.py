"""A row of the rule table."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import RuleError
from autopar.layout import PARTIAL
from autopar.rules.language import Call, Option, Together
from autopar.rules.matches import options

LINEAR = re.compile(r"|all|each|first|\d+(\+\d+)*(\|\d+(\+\d+)*)*")
"""What `Rule.linear` may say."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator may be split.

    `spec` is a rule string, or a function that writes it for one call. `linear` is "", "all" (linear in all operands
    together: add, view, sum), "each" (linear in each operand alone: mul, matmul), "first" (linear in the first: div),
    operand numbers ("1+2": in those together, "0|1": in each alone), or a function that says which for one call.
    `reduce` names the partial result that a split of a summed-over factor leaves: "P" (a sum), "Pmax", "Pmin". `random`
    operators draw numbers. `together` says for one call which factors can also be cut together by one axis of so many
    ranks, each set with the runtime algorithm that makes it right. `also` writes a second rule string for the same
    call, "" for none: its factors may be cut otherwise than those of the first, and only those with a runtime algorithm
    count. `partly` are factors that only a part of the work has, as columns of the second of two products, with its
    share, from 0 to 1.

    Raises RuleError, here or for the first call that it is asked about, where a field says what no operator has.
    """

    spec: str | Callable[[Call], str]
    linear: str | Callable[[Call], str] = ""
    reduce: str = "P"
    random: bool = False
    together: Callable[[Call, int], Together] = lambda call, ways: ()
    also: Callable[[Call], str] = lambda call: ""
    partly: Mapping[str, Callable[[Call], float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.spec, str) and not callable(self.spec):
            raise RuleError(
                f"the spec of a Rule is {self.spec!r}, wanted a rule string such as 'b d -> b d', or a function that "
                "writes one for a call"
            )
        if self.reduce not in PARTIAL:
            raise RuleError(f"rule {self.spec!r}: reduce is {self.reduce!r}, wanted one of {', '.join(PARTIAL)}")
        if not callable(self.linear):
            self._check_linear(self.linear)
        if isinstance(self.spec, str) and (
            other := [factor for factor in self.partly if factor not in re.findall(r"\w+", self.spec)]
        ):
            raise RuleError(f"rule {self.spec!r}: partly has the share of {other[0]!r}, which is no factor of the rule")
        if wrong := [factor for factor, share in self.partly.items() if not callable(share)]:
            raise RuleError(
                f"rule {self.spec!r}: partly[{wrong[0]!r}] is {self.partly[wrong[0]]!r}, wanted a function of the call "
                "that gives the share of the work"
            )

    def text(self, call: Call) -> str:
        """The rule string for one call."""
        found = self.spec if isinstance(self.spec, str) else self.spec(call)
        if not isinstance(found, str):
            raise RuleError(
                f"the spec of the rule for {call.target} wrote {found!r} for a call, wanted a rule string such as 'b d "
                "-> b d'"
            )
        return found

    def options(self, call: Call, ways: int, *, sections: Sequence[tuple[int, ...]] = ()) -> list[Option]:
        """Everything that `call` can do on one axis of `ways` ranks; see `matches.options`."""
        linear = self.linear if isinstance(self.linear, str) else self.linear(call)
        self._check_linear(linear, call)
        found = options(
            self.text(call),
            call,
            ways,
            linear=linear,
            reduce=self.reduce,
            sections=sections,
            together=self.together(call, ways),
        )
        second = self.also(call)
        found += [option for option in options(second, call, ways) if option.run] if second else []
        shares = {factor: share(call) for factor, share in self.partly.items()}
        if wrong := [factor for factor, share in shares.items() if not 0.0 <= share <= 1.0]:
            raise RuleError(
                f"rule {self.text(call)!r} for {call.target}: partly[{wrong[0]!r}] gave {shares[wrong[0]]}, wanted the "
                "share of the work that it cuts, from 0 to 1"
            )
        return (
            [replace(option, cuts=shares.get(option.factor.partition("/")[0], 1.0)) for option in found]
            if shares
            else found
        )

    def _check_linear(self, linear: str, call: Call | None = None) -> None:
        """Raise RuleError unless `linear` says something, of `call` something of operands that it has."""
        known = isinstance(linear, str) and LINEAR.fullmatch(linear)
        last = max(map(int, re.findall(r"\d+", linear)), default=-1) if known else -1
        if not known or (call is not None and last >= len(call.ins)):
            where = (
                f"{self.spec!r}"
                if call is None
                else f"{self.text(call)!r} for {call.target}, which has {len(call.ins)} operands"
            )
            raise RuleError(
                f"rule {where}: linear is {linear!r}, wanted all, each, first, or numbers of operands from 0 on, as "
                "'0+2' (together) or '0|1' (each alone)"
            )
