"""Nets that count bytes alone: what the backward keeps of a value, where the net of its reshards cannot count it.

A net sums over the distinct columns that all of its readers ask for. What is kept is less:

    copies that reshards make      one for each column that is asked for by a reader whose backward keeps it, none for
                                   the columns of other readers
    the value as it is made        once, however many columns take it without a copy (they differ in the gradient's
                                   layout alone)

So where readers that keep nothing may ask for the same columns as others that do, or where the columns of those that do
differ in the gradient's layout alone, a second net without seconds, from the same producer to the readers that keep the
value, counts the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.layout import NO_GRAD
from autopar.problem.nets import AS_MADE, COPIES, Link
from autopar.problem.pairs import LayoutPair
from autopar.problem.saved import Kept
from autopar.problem.types import Use


def counted(links: Sequence[Link], keeps: Kept) -> list[Link]:
    """`links`, each with the bytes that it counts itself, followed by those that count bytes alone."""
    found, alone = [], []
    for link in links:
        own, others = apart(link, keeps)
        found.append(own)
        alone += others
    return found + alone


def apart(link: Link, keeps: Kept) -> tuple[Link, list[Link]]:
    """`link` with what it counts itself, and the links that count the rest of its bytes."""
    others = _links_of_bytes(link, keeps)
    return replace(
        link, counts=tuple([part for part in (COPIES, AS_MADE) if all(part not in other.counts for other in others)])
    ), others


def _links_of_bytes(link: Link, keeps: Kept) -> list[Link]:
    """The links that count bytes alone, beside `link`."""
    if link.weight or link.kind != "edge":
        return []
    keep = [(op.name, operand) in keeps.reads for op, operand in link.readers]
    saved = link.asked_by(lambda op, operand: (op.name, operand) in keeps.reads)
    if not saved:
        return []
    others = link.asked_by(lambda op, operand: (op.name, operand) not in keeps.reads)
    alike = sum(keep) > 1 and len({link.columns[column].value for column in saved}) < len(saved)
    as_made = AS_MADE if (link.key in keeps.charges or link.key in keeps.behind) and (alike or saved & others) else ""
    copies = COPIES if saved & others else ""
    if as_made and copies and not alike:
        return [_bytes_only(link, keep, link.columns, (COPIES, AS_MADE))]
    found = [_bytes_only(link, keep, link.columns, (COPIES,))] if copies else []
    if as_made:  # columns that differ in the gradient's layout alone are one
        values = [LayoutPair(column.value, (NO_GRAD,) * len(column.value)) for column in link.columns]
        found.append(_bytes_only(link, keep, values, (AS_MADE,)))
    return found


def _bytes_only(link: Link, keep: Sequence[bool], columns: Sequence[LayoutPair], counts: tuple[str, ...]) -> Link:
    """A link that counts bytes alone: `link` to those of its readers for which `keep` is true. `columns` are the layout
    pairs that they ask for, `counts` says which bytes it counts."""
    place: dict[LayoutPair, int] = {}
    uses = []
    for kept, use in zip(keep, link.uses, strict=True):
        if kept:
            asked = {
                column: place.setdefault(columns[column], len(place)) for column in dict.fromkeys(use.column.tolist())
            }
            uses.append(Use(use.node, np.array([asked[column] for column in use.column.tolist()])))
    readers = [reader for kept, reader in zip(keep, link.readers, strict=True) if kept]
    return replace(link, readers=readers, columns=list(place), uses=tuple(uses), counts=counts, moves=False)
