"""Nets that count bytes alone: what the backward keeps of a value, where the net of its changes of layout cannot say it.

A net sums over the distinct columns that all of its readers ask for. What is kept is less:

    copies that changes of layout make     one for each column that a reader asks for whose backward keeps it: not those of the other readers
    the value as it lies                   once, however many columns need no copy: those that differ in the gradient's layout alone

So where readers that keep nothing may ask for what others keep, or where columns of those that keep it differ in the gradient's layout
alone, another net from the same producer to those readers alone counts the bytes, without seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.layout import NO_GRAD
from autopar.problem.nets import COPIES, LYING, Link
from autopar.problem.pairs import LayoutPair
from autopar.problem.saved import Kept
from autopar.problem.types import Use


def counted(links: Sequence[Link], keeps: Kept) -> list[Link]:
    """`links`, and behind them those that count bytes alone."""
    found, alone = [], []
    for link in links:
        own, others = apart(link, keeps)
        found.append(own)
        alone += others
    return found + alone


def apart(link: Link, keeps: Kept) -> tuple[Link, list[Link]]:
    """`link` with what it counts itself, and the links that count the rest of its bytes."""
    others = _alone(link, keeps)
    return replace(link, counts=tuple([part for part in (COPIES, LYING) if all(part not in other.counts for other in others)])), others


def _alone(link: Link, keeps: Kept) -> list[Link]:
    if link.weight or link.kind != "edge":
        return []
    keep = [(op.name, operand) in keeps.reads for op, operand in link.readers]
    saved = link.asked_by(lambda op, operand: (op.name, operand) in keeps.reads)
    if not saved:
        return []
    others = link.asked_by(lambda op, operand: (op.name, operand) not in keeps.reads)
    alike = sum(keep) > 1 and len({link.columns[column].value for column in saved}) < len(saved)
    lying = LYING if (link.way in keeps.charges or link.way in keeps.behind) and (alike or saved & others) else ""
    copies = COPIES if saved & others else ""
    if lying and copies and not alike:
        return [_only(link, keep, link.columns, (COPIES, LYING))]
    return [*([_only(link, keep, link.columns, (COPIES,))] if copies else ()),
            *([_only(link, keep, [LayoutPair(c.value, (NO_GRAD,) * len(c.value)) for c in link.columns], (LYING,))] if lying else ())]


def _only(link: Link, keep: Sequence[bool], columns: Sequence[LayoutPair], counts: tuple[str, ...]) -> Link:
    """`link` to its readers that `keep` what they read, which ask for `columns`: of bytes alone."""
    place: dict[LayoutPair, int] = {}
    uses = []
    for kept, use in zip(keep, link.uses, strict=True):
        if kept:
            asked = {column: place.setdefault(columns[column], len(place)) for column in dict.fromkeys(use.column.tolist())}
            uses.append(Use(use.node, np.array([asked[column] for column in use.column.tolist()])))
    readers = [reader for kept, reader in zip(keep, link.readers, strict=True) if kept]
    return replace(link, readers=readers, columns=list(place), uses=tuple(uses), counts=counts, moves=False)
