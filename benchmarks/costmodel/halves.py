"""The split of the measurements: one half to fit constants on, the other to judge them by."""

from __future__ import annotations

import hashlib

from benchmarks.costmodel.rows import Row


def in_half(row: Row) -> str:
    """ "fit" or "held": by the model and the number of devices, so that configurations of one model on one machine are
    never split.

    It depends on nothing but sizes, and is the same for the same row in any file.
    """
    m = row.model
    key = ",".join(map(str, (m.hidden, m.heads, m.layers, m.ffn, m.experts, row.setup.seq, row.cluster.devices)))
    return "fit" if hashlib.sha256(key.encode()).digest()[0] % 2 == 0 else "held"
