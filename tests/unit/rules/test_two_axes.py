"""Two options of one call at once, one on each of two mesh axes, as plans combine them: on shards of shards the
operator gives what it gives whole, gradients included. `test_oracle.py` proves each option alone; options with a
runtime algorithm are compared on real ranks (tests/dist)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from autopar._torch import pytree
from autopar.layout import Entry, crowded, fits, local_shape
from autopar.rules import RULES
from autopar.rules.algorithms import agree
from autopar.rules.language import Call, Option
from autopar.rules.oracle import call_of, compare, cut, gradients, join, shards_of
from autopar.rules.rule import Rule
from tests.unit.rules.samples import Case, case, f, fill, reseed
from tests.unit.rules.table import SAMPLES
from tests.unit.rules.test_completeness import COMPARED, QUICK
from tests.unit.rules.test_oracle import as_emitted

aten = torch.ops.aten
Pair = tuple[Option, Option]
Sizes = tuple[int, int]
FAST = tuple(op for op in QUICK if op not in (aten.linear.default, aten.matmul.default, aten.index_put.default))
"""Rows with few enough pairs for the fast tests."""


def pairs(rule: Rule, call: Call, sizes: Sizes) -> Iterator[Pair]:
    """The pairs of options, major axis first, that a plan may have (`problem.build.fits_together`)."""
    for pair in itertools.product(*(rule.options(call, ways) for ways in sizes)):
        uses = [(*option.ins, *option.outs) for option in pair]
        lies = [tuple(each[index].value for each in uses) for index in range(len(uses[0]))]
        shapes = [tensor.shape for tensor in (*call.ins, *call.outs)]
        cut_evenly = all(
            not crowded(layout) or fits(shape, layout, sizes, crowded(layout))
            for shape, layout in zip(shapes, lies, strict=True)
        )
        if any(option.factor for option in pair) and not any(o.run for o in pair) and agree(pair) and cut_evenly:
            yield pair


def _parts(whole: torch.Tensor, entries: Sequence[Entry], sizes: Sizes) -> list[torch.Tensor]:
    return [inner for outer in cut(whole, entries[0], sizes[0]) for inner in cut(outer, entries[1], sizes[1])]


def _whole(parts: Sequence[torch.Tensor], entries: Sequence[Entry], sizes: Sizes, shape: Any) -> torch.Tensor | str:
    """What the parts of all ranks make, or a text that says what is wrong with them."""
    rows = []
    for number in range(sizes[0]):
        inner = parts[number * sizes[1] : (number + 1) * sizes[1]]
        row = join(inner, entries[1], local_shape(shape, entries[:1], sizes[:1], (number,)))
        if isinstance(row, str):
            return row
        rows.append(row)
    return join(rows, entries[0], shape)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def problem(call: Call, given: Any, pair: Pair, sizes: Sizes) -> str:
    """How shards under `pair` differ from the whole; "" where they agree."""
    ins, outs = _tensors(given), _tensors(call.target(*given[0], **given[1]))
    values, grads = [
        [tuple(getattr(o.outs[i], kind) for o in pair) for i in range(len(outs))] for kind in ("value", "grad")
    ]
    shards = [inner for outer in shards_of(given, pair[0], sizes[0]) for inner in shards_of(outer, pair[1], sizes[1])]
    made = []
    for coord, (args, kwargs) in zip(itertools.product(*map(range, sizes)), shards, strict=True):
        shapes = [local_shape(out.shape, entries, sizes, coord) for out, entries in zip(outs, values, strict=True)]
        made.append(_tensors(as_emitted(call.target, args, kwargs, shapes)))
    loose = any(t.dtype == torch.float32 for t in (*ins, *outs))

    def narrow(x: torch.Tensor) -> torch.Tensor:
        return x.float() if loose and x.dtype == torch.float64 else x

    for i, out in enumerate(outs):
        found = _whole([narrow(each[i].detach()) for each in made], values[i], sizes, out.shape)
        if text := compare(found, narrow(out), f"output {i} {values[i]}", loose):
            return text
    live = [i for i, out in enumerate(outs) if out.requires_grad]
    asked = [i for i, x in enumerate(ins) if x.requires_grad and live]
    pulls = {i: torch.randn_like(outs[i]) for i in live}
    wanted = gradients([outs[i] for i in live], [ins[i] for i in asked], list(pulls.values())) if asked else []
    pulled = {i: _parts(pulls[i], grads[i], sizes) for i in live}
    got = []
    for rank, (each, shard) in enumerate(zip(made, shards, strict=True)):
        own = [i for i in live if each[i].requires_grad]
        leaves = [_tensors(shard)[i] for i in asked]
        got.append(gradients([each[i] for i in own], leaves, [pulled[i][rank] for i in own]) if asked else [])
    for place, i in enumerate(asked):
        entries = tuple(option.ins[i].grad for option in pair)
        found = _whole([narrow(each[place]) for each in got], entries, sizes, ins[i].shape)
        if text := compare(found, narrow(wanted[place]), f"gradient {i} {entries}", loose):
            return text
    return ""


def wrong(target: Any, rule: Rule, one: Case, sizes: Sizes) -> list[str]:
    reseed()
    args, kwargs = fill((list(one.args), dict(one.kwargs)))
    call, given = call_of(target, args, kwargs), (tuple(args), dict(kwargs))
    found = [([o.factor for o in pair], problem(call, given, pair, sizes)) for pair in pairs(rule, call, sizes)]
    return [f"{target} {factors} on {sizes}: {text}" for factors, text in found if text]


@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        pytest.param(op, sizes, marks=() if op in FAST and sizes == (2, 2) else pytest.mark.slow)
        for op in COMPARED
        for sizes in ((2, 2), (2, 3))
    ],
    ids=lambda item: str(item).split(" at ")[0],
)
def test_any_two_options_together(target, sizes):
    found = [text for one in SAMPLES[target] for text in wrong(target, RULES[target], one, sizes)]
    assert not found, "\n".join(found)


PLANTED = {
    "a bias that every rank adds": (aten.addmm.default, Rule("n, m k, k n -> m n"), case(f(6), f(4, 6), f(6, 6))),
    "means of parts, added up": (aten.mean.dim, Rule("a b -> b"), case(f(4, 6), [0])),
    "both factors of a product are parts": (aten.mul.Tensor, Rule("..., ... -> ...", linear="all"), case(f(4), f(4))),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_row_is_rejected(name):
    target, rule, one = PLANTED[name]
    assert wrong(target, rule, one, (2, 2))
