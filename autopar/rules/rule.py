"""A row of the rule table: how one operator may be split. Written by the families of operators, and by users
(`rules=`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import RuleError
from autopar.layout import PARTIAL
from autopar.rules.language import Call, Option, Together
from autopar.rules.matches import options

LINEAR = re.compile(r"|all|each|first|\d+(\+\d+)*(\|\d+(\+\d+)*)*")
"""The form of `Rule.linear`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator may be split on one mesh axis.

    `spec` is a rule string (grammar: `rules.language`), or a function that writes one for a given call.

    `linear` says in which operands the operator is linear, so that partial sums may pass through it: "" in none, "all"
    in all operands together (add, view, sum), "each" in each operand with the others fixed (mul, matmul), "first" in
    the first operand (div), or operand numbers ("1+2": in those two together, "0|1": in each of the two); or a function
    that gives one of these for a call.

    `reduce` is the partial result that remains where a factor that is summed over is split: "P" (a sum), "Pmax",
    "Pmin".

    `random`: the operator draws random numbers.

    `together` gives, for a call and a number of ranks, the sets of factors that one axis may cut at the same time, each
    with the runtime algorithm that does it.

    `also` writes a second rule string for the call ("" for none), in which factors are grouped in another way. Only its
    options with a runtime algorithm are used.

    `partly` is for factors that occur in only part of the work, such as columns of the second of two products: for
    each, a function that gives the share of the FLOPs in which it occurs, from 0 to 1.

    Raises RuleError where a field is malformed: when made if that can be seen then, else by `text` and `options`."""

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
        """The rule string for one call. Raises RuleError where the function `spec` gave no string."""
        found = self.spec if isinstance(self.spec, str) else self.spec(call)
        if not isinstance(found, str):
            raise RuleError(
                f"the spec of the rule for {call.target} wrote {found!r} for a call, wanted a rule string such as 'b d "
                "-> b d'"
            )
        return found

    def options(self, call: Call, ways: int, *, sections: Sequence[tuple[int, ...]] = ()) -> list[Option]:
        """All options of `call` on an axis of `ways` ranks: those of the rule string and of `together` (see
        `matches.options`), and those with a runtime algorithm of the rule string that `also` writes.

        Raises RuleError where the rule does not fit the call."""
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
        return self.cutting(call, found)

    def cutting(self, call: Call, found: Sequence[Option]) -> list[Option]:
        """Options of `call`, with the share of its work that each cuts (Option.cuts). Raises RuleError where `partly`
        gives something else."""
        shares = {factor: share(call) for factor, share in self.partly.items()}
        if wrong := [factor for factor, share in shares.items() if not 0.0 <= share <= 1.0]:
            raise RuleError(
                f"rule {self.text(call)!r} for {call.target}: partly[{wrong[0]!r}] gave {shares[wrong[0]]}, wanted the "
                "share of the work that it cuts, from 0 to 1"
            )
        if not shares:
            return list(found)
        return [replace(option, cuts=shares.get(option.factor.partition("/")[0], 1.0)) for option in found]

    def _check_linear(self, linear: str, call: Call | None = None) -> None:
        """Raise RuleError unless `linear` is well-formed, and where `call` is given names only operands that it has."""
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
