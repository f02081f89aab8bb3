"""What one pass takes at least: its prices, as columns of a linear program, and what these make of its quantities.

What one pass of a scope takes (problem.hiding.together_s) is at least, with S all that is shown, C compute, W collectives that are waited for, Q = A + B + L what
is in the background of each mesh axis a (problem.pass_tables), the least of

    S + c sum x_a + tail + sum late_a + sum slow_l    where
        x_a + y_a + tail + late_a >= Q_a          each axis moves while compute runs, while others are waited for, when the work is done, or is waited for
        x_a <= C + c sum x                        compute lasts as long: c is the share that each collective behind it takes
        y_a <= W + sum late + sum slow            waits last as long, and longer for links that are shared, which is no help to what shares them (`helped`)
        y_a <= u (1 - c) x_a + sum late + sum slow   where W <= u C: the work is spread evenly, so that what runs under waits runs under compute too
        late_a >= L_a - H_a                       of leaves that are gathered once per step some can be ahead (problem.leaf_gathers: Passing.LATE and leaves_s)
        slow_l >= t (1 - c axes) (Q_a - y_a - tail - late_a) - u n (1 - c) (Q_a - K_a)    where W <= u C and t C <= F_l, K_a is what of Q_a, F_l what of W takes
                                                  the link of level l (Passing.LINKS), and a one of n axes that do

By duality it is no less than S + sum over a of

    p_a Q_a - e_a C - (w_a) W + l_a (L_a - H_a) + k_a (t (1 - c axes) Q_a - u n (1 - c) (Q_a - K_a))
    for all    p_a + c sum e + u (1 - c) r_a <= c + e_a,  p_a + v k_a <= w_a + r_a,  sum (p + v k) <= 1,  p_a + v k_a + l_a + sum (w + r) <= 1,
               sum k + sum of helped (w + r) <= 1 of each level,    with v = t (1 - c axes)

and not negative ones; gathers of one block in a backward are taken at the lower price of p_a there and in what is outside of blocks. Of solutions with W between t C and u C (`spans`) it is no less with any m (t C - W) + n (W - u C) added, too, and likewise
with F_l; no quantity may get a negative price by that.

Slow_l: what is in the background of a for the share f of the work, with the share b of the link, makes the waits of the level last (F + W b - W) f longer at least: their own shares of the link
and b are together more than there is. That is f F - f W (1 - b), of which f F >= t C f >= t (1 - c axes) x_a, and f W (1 - b) <= u C f (1 - b) <= u n (1 - c) x_a (1 - b), no more than with Q - K = (1 - b) Q in place
of the last two, because no more than Q moves; n, because as many as share a link are as many times slower.

On devices that compute and move with the same cores (no overlap) all of Q is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autopar.joint.relaxed import ALL, Key, Relaxed
from autopar.problem.pass_tables import BACKWARD, COMPUTE, FORWARD, SHOWN, WAITED, PassTables
from autopar.search.model import Linear


class Polytope:
    """The columns of one pass in a linear program, and what they make of its quantities: `taken[quantity, column]`."""

    def __init__(self, model: Linear, relaxed: Relaxed, key: Key, top: Polytope | None = None) -> None:
        """Of the pass `key`; `top` is that of what is outside of blocks, in which gathers of one block may begin."""
        self.model, self.passing = model, relaxed.passing
        self.axes = range(self.passing.axes)
        self._made: list[Mapping[int, float]] = []  # of each column
        self._upper: list[float] = []  # of each row, and its entries
        self._entries: list[tuple[int, int, float]] = []
        first = first_of(relaxed.passing, key) if relaxed.hides else 0.0
        self.p = [self._column({self.passing.ahead(a): 1.0 - first, self.passing.behind(a): 1.0, self.passing.leaf(a): 1.0}) for a in self.axes]
        if first and top is not None:
            for a, p in enumerate(self.p):
                earlier = self._column({self.passing.ahead(a): first})
                self._row({earlier: 1.0, p: -1.0}, 0.0)
                self._row({earlier: 1.0, top.p[a]: -1.0}, 0.0)
        if relaxed.hides:
            self._hidden(relaxed, key, first)
        else:
            for p in self.p:
                self._row({p: 1.0}, 1.0)
        self.columns = model.add_columns(np.zeros(len(self._made)), np.zeros(len(self._made)))
        self.taken = np.zeros((self.passing.width + 1, len(self._made)))
        for column, taken in enumerate(self._made):
            for quantity, value in taken.items():
                self.taken[quantity, column] = value
        model.add_rows(len(self._upper), -math.inf, np.array(self._upper))
        rows, columns, values = np.array(self._entries).reshape(-1, 3).T
        model.add_entries(rows.astype(int), columns.astype(int), values)

    def _ahead_s(self, key: Key) -> np.ndarray | None:
        """By axis what leaves are late less than LATE says; None where there are none of them."""
        scope, way = key
        most_s = self.passing.leaves_s.get(scope) if way == FORWARD else None
        return most_s if most_s is not None and most_s.any() else None

    def _hidden(self, relaxed: Relaxed, key: Key, first: float) -> None:
        """What is in the background; the share `first` of gathers may be under what is in front."""
        axes, contention, ahead_s = self.axes, self.passing.model.prices.contention, self._ahead_s(key)
        most = relaxed.spans.get((key, ""), ALL)[1]
        even = math.isfinite(most)
        e = [self._column({COMPUTE: -1.0}) for _ in axes]
        w = [self._column({WAITED: -1.0}) for _ in axes]
        r = [self._column({}) for _ in axes if even]
        late = [self._column({self.passing.late_leaf(a): 1.0, self.passing.width: -float(ahead_s[a])}) for a in axes if ahead_s is not None]
        beside = [relaxed.spans.get((key, level), ALL)[0] * (1.0 - min(0.99, contention * len(axes))) * bool(level and even) for level in self.passing.link]
        k = {a: self._slows(a, beside[a], most * (1.0 - contention), first) for a in axes if beside[a] > 0.0}
        waiting = dict.fromkeys([*w, *r], 1.0)
        for a, p in enumerate(self.p):
            slow = {k[a]: beside[a]} if a in k else {}
            self._row({p: 1.0, **dict.fromkeys(e, contention), e[a]: contention - 1.0, **({r[a]: most * (1.0 - contention)} if even else {})}, contention)
            self._row({p: 1.0, w[a]: -1.0, **({r[a]: -1.0} if even else {}), **slow}, 0.0)
            self._row({p: 1.0, **waiting, **slow, **({late[a]: 1.0} if late else {})}, 1.0)
        self._row({**dict.fromkeys(self.p, 1.0), **{k[a]: beside[a] for a in k}}, 1.0)
        self._row(dict.fromkeys(e, 1.0), 1.0)
        for level in dict.fromkeys(self.passing.link):
            helped = [column for a in axes if self.passing.link[a] != level or not self.passing.plain[level] for column in (w[a], *r[a:a + 1])]
            self._row({**dict.fromkeys(helped, 1.0), **{k[a]: 1.0 for a in k if self.passing.link[a] == level}}, 1.0)
        self._within(relaxed, key, waiting, e)

    def _slows(self, axis: int, moving: float, starting: float, first: float) -> int:
        """The column of what `axis` slows: so much of what it has in the background, less so much of what of that does not take its link."""
        passing, level = self.passing, self.passing.link[axis]
        less = starting * self.passing.link.count(level)
        column = self._column({passing.ahead(axis): (1.0 - first) * moving - less, passing.behind(axis): moving - less, passing.leaf(axis): moving - less,
                               passing.links_behind(axis): less})
        self._row({column: less - (1.0 - first) * moving, self.p[axis]: first - 1.0}, 0.0)  # what is in the background gains nothing
        return column

    def _within(self, relaxed: Relaxed, key: Key, waiting: Mapping[int, float], e: list[int]) -> None:
        """What solutions within the spans of the pass may be charged beside; what is waited for gains nothing by it, nor does compute."""
        waits, computes = dict(waiting), dict.fromkeys(e, 1.0)
        linked = [waits]
        for level in dict.fromkeys(("", *self.passing.link)):
            least, most = relaxed.spans.get((key, level), ALL)
            taken = [WAITED] if not level else [self.passing.links_waited(a) for a in self.axes if self.passing.link[a] == level]
            own = dict[int, float]()
            if least > 0.0:
                under = self._column({COMPUTE: least, **dict.fromkeys(taken, -1.0)})
                own[under], computes[under] = 1.0, -least
            if math.isfinite(most):
                over = self._column({COMPUTE: -most, **dict.fromkeys(taken, 1.0)})
                own[over], computes[over] = -1.0, most
            if not level:
                waits.update(own)
            elif own:
                linked.append({**waits, **own})
        for each in linked:
            self._row(each, 1.0)
        self._row(computes, 1.0)

    def _column(self, taken: Mapping[int, float]) -> int:
        """A column of what it makes of quantities; its number in the program."""
        self._made.append(taken)
        return self.model.columns + len(self._made) - 1

    def _row(self, terms: Mapping[int, float], upper: float) -> None:
        row = self.model.rows + len(self._upper)
        if terms:
            self._upper.append(upper)
            self._entries += [(row, column, value) for column, value in terms.items()]


def first_prices(relaxed: Relaxed) -> dict[Key, np.ndarray]:
    """Prices of all passes that are possible and near the best where what is in the background hides under compute: p and w of each axis as much as its share of compute."""
    passing, axes = relaxed.passing, range(relaxed.passing.axes)
    p = min(passing.model.prices.contention, 1.0 / (len(axes) + 1)) if relaxed.hides else 1.0
    found = {}
    for key in relaxed.keys:
        values = np.zeros(passing.width + 1)
        values[SHOWN] = 1.0
        for a in axes:
            values[[passing.ahead(a), passing.behind(a), passing.leaf(a)]] = p * (1.0 - first_of(passing, key) * relaxed.hides), p, p
        values[WAITED] = -p * len(axes) * relaxed.hides
        found[key] = relaxed.times[key] * values
    return found


def first_of(passing: PassTables, key: Key) -> float:
    """The share of one block, whose gathers may begin under what is in front of a backward that follows its forward (pipeline.passes)."""
    scope, way = key
    return 1.0 / passing.model.links[0].program.runs[scope].count if scope and way == BACKWARD and not passing.sums_at_end else 0.0
