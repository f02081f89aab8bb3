"""A linear lower bound of the seconds of one pass, as columns and rows of a linear program: all prices of its
quantities that are valid.

Quantities of the pass of a scope (problem.pass_tables): S all that is not in the background, C compute, W waited-for
collectives, and by mesh axis a the background Q_a = A_a + B_a + L_a (gathers, other collectives, leaves); c is the
share of the compute units that one background collective takes. The seconds of the pass (problem.hiding.together_s) are
at least the minimum of

    S + c sum x_a + tail + sum slow_l

over non-negative variables: seconds of the background of a under compute (x_a) and under waits (y_a), after the work
(tail), and by which waits are longer because background collectives share the links of level l (slow_l). They are
subject to

    1  x_a + y_a + tail >= Q_a                       all of the background runs at some time
    2  x_a <= C + c sum x                            compute, slowed down, lasts so long
    3  y_a <= W + sum slow                           waits last so long; without slow_l of a's own level, as sharing a
                                                     link does not speed it up
    4  y_a <= u (1 - c) x_a + sum slow               if W <= u C: work is spread evenly, so that little runs under waits
                                                     alone
    5  slow_l >= t (1 - c axes) (Q_a - y_a - tail) - u n (1 - c) (Q_a - K_a)
                                                     if W <= u C and t C <= F_l; F_l is the part of W, K_a that of Q_a,
                                                     which takes the links of level l (LINKS), and n axes do

Rows 4 and 5 are of a step of one stage and one microbatch, which is not priced below even spreading (work.least_s).
Others are priced in program order only, in which all of the background may run under compute.

By duality that minimum is at least

    S + sum over a of  p_a Q_a - e_a C - w_a W + k_a (t (1 - c axes) Q_a - u n (1 - c) (Q_a - K_a))

for all non-negative p (row 1), e (row 2), w (row 3), r (row 4), k (row 5) with, where v = t (1 - c axes),

    p_a + c sum e + u (1 - c) r_a <= c + e_a               of x_a
    p_a + v k_a <= w_a + r_a                               of y_a
    sum (p + v k) <= 1                                     of tail
    sum of k on level l + sum of (w + r) helped by it <= 1 of slow_l

The gathers of one block in a backward after its forward may overlap the scope "" too: their price is the lower one of
p_a in both. For solutions with t C <= W <= u C (`spans`), any m (t C - W) + n (W - u C) with m, n >= 0 may be added,
and the same for F_l, as long as no quantity gets a negative price.

Row 5: let a run for the share f of the work in the background, and use the share b of the link. Meanwhile the waits of
level l and a want more than the link has, so that the waits last at least f (F + b W - W) = f F - f W (1 - b) longer.
Here f F >= t C f >= t (1 - c axes) x_a, and f W (1 - b) <= u C f (1 - b) <= u n (1 - c) x_a (1 - b), where n bounds how
much slower a is on a link that n axes share. With Q - K = (1 - b) Q instead of x_a (1 - b), which is no less, follows
row 5.

On devices whose cores both compute and communicate nothing overlaps, and all of Q is exposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from autopar.joint.relaxed import ALL, Key, Relaxed
from autopar.problem.pass_quantities import COMPUTE, SHOWN, WAITED
from autopar.problem.pass_tables import BACKWARD, PassTables
from autopar.search.model import Linear


class Polytope:
    """The dual variables of one pass as `columns` of a linear program. `taken` [quantities and 1, columns]: the
    coefficient of each quantity in the bound, per unit of a column."""

    def __init__(self, model: Linear, relaxed: Relaxed, key: Key, top: Polytope | None = None) -> None:
        """Add the pass `key` to `model`. `top`: the same pass outside of blocks, which the gathers of one block may
        overlap."""
        self.model, self.passing = model, relaxed.passing
        self.axes = range(self.passing.axes)
        self._made: list[Mapping[int, float]] = []  # the coefficients of each column
        self._upper: list[float] = []  # the upper limit of each row; its entries follow
        self._entries: list[tuple[int, int, float]] = []
        first = first_of(relaxed.passing, key) if relaxed.hides else 0.0
        self.p = [
            self._column({self.passing.ahead(a): 1.0 - first, self.passing.behind(a): 1.0, self.passing.leaf(a): 1.0})
            for a in self.axes
        ]
        if first and top is not None:
            for a, p in enumerate(self.p):
                earlier = self._column({self.passing.ahead(a): first})
                self._row({earlier: 1.0, p: -1.0}, 0.0)
                self._row({earlier: 1.0, top.p[a]: -1.0}, 0.0)
        if relaxed.hides:
            self._overlap(relaxed, key, first)
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

    def _overlap(self, relaxed: Relaxed, key: Key, first: float) -> None:
        """The dual variables e, w, r, k and their constraints. The share `first` of gathers may overlap what comes
        before the scope."""
        axes, contention = self.axes, self.passing.model.prices.contention
        most = relaxed.spans.get((key, ""), ALL)[1]
        even = math.isfinite(most) and not self.passing.sums_at_end  # stages are priced in program order
        e = [self._column({COMPUTE: -1.0}) for _ in axes]
        w = [self._column({WAITED: -1.0}) for _ in axes]
        r = [self._column({}) for _ in axes if even]
        beside = [
            relaxed.spans.get((key, level), ALL)[0] * (1.0 - min(0.99, contention * len(axes))) * bool(level and even)
            for level in self.passing.link
        ]
        k = {a: self._slows(a, beside[a], most * (1.0 - contention), first) for a in axes if beside[a] > 0.0}
        waiting = dict.fromkeys([*w, *r], 1.0)
        for a, p in enumerate(self.p):
            slow = {k[a]: beside[a]} if a in k else {}
            self._row(
                {
                    p: 1.0,
                    **dict.fromkeys(e, contention),
                    e[a]: contention - 1.0,
                    **({r[a]: most * (1.0 - contention)} if even else {}),
                },
                contention,
            )
            self._row({p: 1.0, w[a]: -1.0, **({r[a]: -1.0} if even else {}), **slow}, 0.0)
        self._row({**dict.fromkeys(self.p, 1.0), **{k[a]: beside[a] for a in k}}, 1.0)
        self._row(dict.fromkeys(e, 1.0), 1.0)
        for level in dict.fromkeys(self.passing.link):
            helped = [
                column
                for a in axes
                if self.passing.link[a] != level or not self.passing.plain[level]
                for column in (w[a], *r[a : a + 1])
            ]
            self._row({**dict.fromkeys(helped, 1.0), **{k[a]: 1.0 for a in k if self.passing.link[a] == level}}, 1.0)
        self._within(relaxed, key, waiting, e)

    def _slows(self, axis: int, moving: float, starting: float, first: float) -> int:
        """The column k of an axis: `moving` times its background, less `starting` times (by the number of axes on its
        level) the part of it that does not take the level's link."""
        passing, level = self.passing, self.passing.link[axis]
        less = starting * self.passing.link.count(level)
        column = self._column(
            {
                passing.ahead(axis): (1.0 - first) * moving - less,
                passing.behind(axis): moving - less,
                passing.leaf(axis): moving - less,
                passing.links_behind(axis): less,
            }
        )
        # no background quantity gets a negative price
        self._row({column: less - (1.0 - first) * moving, self.p[axis]: first - 1.0}, 0.0)
        return column

    def _within(self, relaxed: Relaxed, key: Key, waiting: Mapping[int, float], e: list[int]) -> None:
        """The terms m (t C - W) + n (W - u C) of the spans of the pass, and rows by which neither W nor C gets a
        negative price."""
        waits, computes = dict(waiting), dict.fromkeys(e, 1.0)
        linked = [waits]
        for level in dict.fromkeys(("", *self.passing.link)):
            least, most = relaxed.spans.get((key, level), ALL)
            taken = (
                [WAITED]
                if not level
                else [self.passing.links_waited(a) for a in self.axes if self.passing.link[a] == level]
            )
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
        """Add a column with the coefficients `taken` of quantities; its number in the program."""
        self._made.append(taken)
        return self.model.columns + len(self._made) - 1

    def _row(self, terms: Mapping[int, float], upper: float) -> None:
        """Add the row sum of terms <= upper."""
        row = self.model.rows + len(self._upper)
        if terms:
            self._upper.append(upper)
            self._entries += [(row, column, value) for column, value in terms.items()]


def first_prices(relaxed: Relaxed) -> dict[Key, np.ndarray]:
    """Valid prices of all passes, which are near the best ones where compute overlaps the whole background: p_a = w_a =
    c."""
    passing, axes = relaxed.passing, range(relaxed.passing.axes)
    p = min(passing.model.prices.contention, 1.0 / (len(axes) + 1)) if relaxed.hides else 1.0
    found = {}
    for key in relaxed.keys:
        values = np.zeros(passing.width + 1)
        values[SHOWN] = 1.0
        for a in axes:
            values[[passing.ahead(a), passing.behind(a), passing.leaf(a)]] = (
                p * (1.0 - first_of(passing, key) * relaxed.hides),
                p,
                p,
            )
        values[WAITED] = -p * len(axes) * relaxed.hides
        found[key] = relaxed.times[key] * values
    return found


def first_of(passing: PassTables, key: Key) -> float:
    """The share of a run that one block is, whose gathers may overlap what comes before the run in a backward after its
    forward (pipeline.aggregate); 0 elsewhere."""
    scope, way = key
    return (
        1.0 / passing.model.links[0].program.runs[scope].count
        if scope and way == BACKWARD and not passing.sums_at_end
        else 0.0
    )
