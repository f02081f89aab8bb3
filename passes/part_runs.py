"""Takes runs of alike blocks apart, so that each part of a run can be laid out in its own way. Called by
Captured.parted and joint.search_context.

    (h,) = layers_0(h, mask)   x 32      ->      (g,) = layers_0(h, mask)    x 12
                                                 (h,) = layers_12(g, mask)   x 20

The blocks of each part stay folded; names inside them stay as they are. A part of one block can be divided once more,
behind one of its operators (passes.divide_block).
"""

from __future__ import annotations

import copy
import itertools
import operator
import re
from collections.abc import Mapping, Sequence

from torch import fx

from passes import edit
from passes.divide_block import divide_block
from passes.fold_repeats import body_of, is_folded

Parts = Mapping[str, Mapping[str, int | str]]
"""Run (by the name of its body) -> names of its second, third, ... part, each with its first instance; or, where it is
the rest of a block, with the operator of the block behind which it begins: the part before it is the block up to
there."""


def part_runs(gm: fx.GraphModule, parts: Parts) -> fx.GraphModule:
    """needs: a folded graph.
    does: divides runs: each part but the first is a call of a copy of the body, with the weights of its own instances.
    gives: a new graph; `gm` is not changed. Raises ValueError for a run that is not there or cannot be divided so."""
    parted = copy.deepcopy(gm)
    parted.meta.update(gm.meta)
    calls = {str(node.target): node for node in parted.graph.nodes if is_folded(node)}
    for name, begins in parts.items():
        if name not in calls:
            raise ValueError(f"there is no run {name!r} to be parted; the graph has {', '.join(calls) or 'none'}")
        _part(parted, calls[name], {part: first for part, first in begins.items() if isinstance(first, int)})
        for before, (part, behind) in zip([name, *begins], begins.items(), strict=False):
            if isinstance(behind, str):
                _check_free(parted, part, before)
                call = next(node for node in parted.graph.nodes if is_folded(node) and node.target == before)
                divide_block(parted, call, part, behind)
    return edit.finish(parted)


def parts_at(gm: fx.GraphModule, begins: Mapping[str, Sequence[int]]) -> dict[str, dict[str, int | str]]:
    """The Parts that begin with these instances of each run, named as the fold would have named them: by the first
    module, with a number behind it where that name is taken (`a.b.4` and `a_b.4`; two runs through the same blocks)."""
    found: dict[str, dict[str, int | str]] = {}
    for run, firsts in begins.items():
        about, found[run] = gm.get_submodule(run).meta, {}
        for first in firsts:
            base = f"{about['container']}_{about['start'] + first * about['period']}"  # type: ignore[index]
            found[run][_free_name(gm, found, base)] = first
    return found


def divided_at(gm: fx.GraphModule, blocks: Mapping[str, Mapping[int, str]]) -> dict[str, dict[str, int | str]]:
    """The Parts in which some instances of each run are divided, each behind one operator."""
    counts = {str(node.target): int(node.meta["repeat"]) for node in gm.graph.nodes if is_folded(node)}
    ends = {run: {end for first in at for end in (first, first + 1)} - {0, counts[run]} for run, at in blocks.items()}
    parts = parts_at(gm, {run: sorted(firsts) for run, firsts in ends.items()})
    found: dict[str, dict[str, int | str]] = {}
    for run, at in blocks.items():
        found[run] = {}
        for name, first in {run: 0, **parts[run]}.items():
            if name != run:
                found[run][name] = first
            if first in at:
                found[run][_free_name(gm, {**parts, **found}, f"{name}_rest")] = at[int(first)]
    return found


def _free_name(gm: fx.GraphModule, parts: Parts, base: str) -> str:
    """`base` as a name of a part; with a number where the graph or other `parts` have that name."""
    base, taken = re.sub(r"\W", "_", base), {name for each in parts.values() for name in each}
    names = itertools.chain([base], (f"{base}_{number}" for number in itertools.count(1)))
    return next(name for name in names if name not in taken and not hasattr(gm, name))


def whole_name(name: str, parts: Parts) -> str:
    """The name, in the whole run, of an operator of a part of it; `name` itself for others."""
    scope, _, rest = name.rpartition("/")
    whole = next((whole for whole, begins in parts.items() if scope in begins), None)
    return name if whole is None else f"{whole}/{rest}"


def _part(gm: fx.GraphModule, call: fx.Node, begins: Mapping[str, int]) -> None:
    """Divide one run, in place: `begins` names its parts but the first, with their first instances."""
    whole, body = int(call.meta["repeat"]), body_of(call)
    edges = [0, *begins.values(), whole]
    if any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(
            f"{call.target} has {whole} instances and cannot be parted in front of {list(begins.values())}: every part "
            "needs one"
        )
    for name in begins:
        _check_free(gm, name, str(call.target))
    given = [user for user in call.users if user.target is operator.getitem]
    call.meta["of"], last = whole, call
    for name, (first, stop) in zip(begins, itertools.pairwise(edges[1:]), strict=True):
        gm.add_submodule(name, _sliced(str(call.target), body, first, stop))
        last = _behind(gm, last, name, stop - first)
    for item in given:
        item.replace_input_with(call, last)
        last.append(item)
    _slice(body, 0, edges[1])
    call.meta["repeat"] = edges[1]


def _check_free(gm: fx.GraphModule, name: str, whole: str) -> None:
    """Raise ValueError where a part of the run `whole` has a name that is taken."""
    if hasattr(gm, name):
        raise ValueError(f"a part of {whole} cannot be called {name!r}: the graph has that already")


def _sliced(whole: str, body: fx.GraphModule, first: int, stop: int) -> fx.GraphModule:
    """A copy of `body`, the body of the run `whole`, with the weights of the instances `[first, stop)`."""
    part = copy.deepcopy(body)
    part.meta.update(body.meta)
    part.meta["start"] += first * part.meta["period"]
    part.meta["part"] = (whole, first)
    _slice(part, first, stop)
    return part


def _slice(body: fx.GraphModule, first: int, stop: int) -> None:
    """Restrict the names of weights of a body to the instances `[first, stop)`."""
    for node in body.graph.nodes:
        if "fqns" in node.meta:
            node.meta["fqns"] = node.meta["fqns"][first:stop]


def _behind(gm: fx.GraphModule, before: fx.Node, name: str, count: int) -> fx.Node:
    """A call of the body `name` for `count` instances, which continues from the results of the call `before`."""
    states = before.meta["val"]
    with edit.after(before):
        call = gm.graph.call_module(name, before.args)
        call.meta.update({**before.meta, "repeat": count})
    with edit.before(call):
        for place, value in enumerate(states):
            item = gm.graph.call_function(operator.getitem, (before, place))
            item.meta.update(val=value, module=before.meta["module"], source=before.meta["source"])
            call.update_arg(place, item)
    return call
