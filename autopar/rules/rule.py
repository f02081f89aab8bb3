"""A row of the rule table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.rules.language import Call, Option, Together, options


@dataclass(frozen=True, slots=True)
class Rule:
    """How one operator may be split.

    `spec` is a rule string, or a function that writes it for one call. `linear` is "", "all" (linear in all operands
    together: add, view, sum), "each" (linear in each operand alone: mul, matmul), "first" (linear in the first: div),
    operand numbers ("1+2": in those together, "0|1": in each alone), or a function that says which for one call. `reduce` names the partial result that a split of a summed-over factor
    leaves: "P" (a sum), "Pmax", "Pmin". `random` operators draw numbers. `together` says for one call which factors can also be cut
    together by one axis of so many ranks, each set with the runtime algorithm that makes it right. `also` writes a second rule string for
    the same call, "" for none: its factors may be cut otherwise than those of the first, and only those with a runtime algorithm count. `partly` are factors
    that only a part of the work has, as columns of the second of two products, with its share.
    """

    spec: str | Callable[[Call], str]
    linear: str | Callable[[Call], str] = ""
    reduce: str = "P"
    random: bool = False
    together: Callable[[Call, int], Together] = lambda call, ways: ()
    also: Callable[[Call], str] = lambda call: ""
    partly: Mapping[str, Callable[[Call], float]] = field(default_factory=dict)

    def text(self, call: Call) -> str:
        """The rule string for one call."""
        return self.spec if isinstance(self.spec, str) else self.spec(call)

    def options(self, call: Call, ways: int, *, sections: Sequence[tuple[int, ...]] = ()) -> list[Option]:
        """Everything that `call` can do on one axis of `ways` ranks; see `language.options`."""
        linear = self.linear if isinstance(self.linear, str) else self.linear(call)
        found = options(self.text(call), call, ways, linear=linear, reduce=self.reduce, sections=sections,
                        together=self.together(call, ways))
        second = self.also(call)
        found += [option for option in options(second, call, ways) if option.run] if second else []
        shares = {factor: share(call) for factor, share in self.partly.items()}
        return [replace(option, cuts=shares.get(option.factor.partition("/")[0], 1.0)) for option in found] if shares else found
