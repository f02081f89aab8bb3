"""Attention with rows and keys cut together: when it can be, and what it sends
(autopar.runtime.algorithms.ring_attention)."""

from __future__ import annotations

from autopar.rules.arguments import given
from autopar.rules.language import Call, Together
from autopar.rules.site import InnerCollective, Site

QUERY, KEY, VALUE = 0, 1, 2


def ring(call: Call, ways: int) -> Together:
    """Query rows and keys are cut together: keys and values go round the ranks. A mask keeps its columns whole.

    Not where weights are dropped (masks would have to agree between ranks), nor where rows and keys differ in number or
    anything but grouped heads is broadcast.
    """
    arguments, (query, key, value) = given(call), (t.shape for t in call.ins[:3])
    grouped = 1 if arguments["enable_gqa"] else 0
    same = len(query) == len(key) == len(value) > 1 and query[-2] == key[-2] == value[-2] and key[:-2] == value[:-2]
    if not same or arguments["dropout_p"] or query[: -2 - grouped] != key[: -2 - grouped]:
        return ()
    return ((("q", "k"), "ring"),)


def later_rows(site: Site) -> float:
    """Pace of `causal_rows`: the last of n ranks multiplies 1/n of the rows by all keys; a causal whole is half of all
    pairs."""
    return 2.0


def pace(site: Site) -> float:
    """In contiguous chunks the last of n ranks has n - 1/2 of the n^2 / 2 pairs of chunks of a causal whole; in halves
    all have as many."""
    return (2 * site.ways - 1) / site.ways if site.argument("is_causal") and not _in_halves(site) else 1.0


def _in_halves(site: Site) -> int:
    """1 or 0, as runtime.algorithms.ring_order.Order.zigzag."""
    return int(site.argument("is_causal") and site.ways > 1 and site.operands[QUERY].sizes[-2] % (2 * site.ways) == 0)


def _hops(site: Site) -> int:
    return site.ways - 1


def _home(site: Site) -> int:
    return int(site.ways > 1)


def _all(site: Site) -> float:
    return site.local_bytes(QUERY) + _keys(site)


def _keys(site: Site) -> float:
    """Where an axis has `own_heads` beside the ring, only the heads that it takes go round."""
    return site.local_bytes(KEY, VALUE) * _taken(site)


def _taken(site: Site) -> float:
    """The share of the local heads of keys and values that runtime.algorithms.own_heads takes on each rank of even
    cuts."""
    if not any(option.run == "own_heads" for option in site.options):
        return 1.0
    dim = len(site.operands[QUERY].shape) - 3
    queries, group = round(site.local(QUERY, dim)), site.operands[QUERY].sizes[dim] // site.operands[KEY].sizes[dim]
    taken = queries // group if queries % group == 0 else 1 if group % queries == 0 else queries
    return taken / site.local(KEY, dim)


def _sums(site: Site) -> float:
    """Gradients of keys and values are summed up, and sent, in float32 or wider."""
    return _keys(site) * max(4, site.operands[KEY].itemsize) / site.operands[KEY].itemsize


def _result(site: Site) -> float:
    """As many rows as queries, as wide as values."""
    lead = range(len(site.operands[QUERY].shape) - 1)
    return (
        site.local(QUERY, *lead)
        * site.local(VALUE, len(site.operands[VALUE].shape) - 1)
        * site.operands[QUERY].itemsize
    )


def _result_and_gradient(site: Site) -> float:
    return 2 * _result(site)


FORWARD = (
    InnerCollective("send", _all, _in_halves, reorders=True),
    InnerCollective("send", _keys, _hops, hidden=True),
    InnerCollective("send", _result, _in_halves, reorders=True, last=True),
)
BACKWARD = (
    InnerCollective("send", _result_and_gradient, _in_halves, reorders=True),
    InnerCollective("send", _keys, _hops, hidden=True),
    InnerCollective("send", _sums, _hops, hidden=True),
    InnerCollective("send", _sums, _home, last=True),
    InnerCollective("send", _all, _in_halves, reorders=True, last=True),
)
