"""Ring attention, with query rows and keys cut by one axis: when it can be used, and what it sends
(autopar.runtime.algorithms.ring_attention)."""

from __future__ import annotations

from autopar.rules.arguments import given
from autopar.rules.language import Call, Together
from autopar.rules.site import InnerCollective, Site

QUERY, KEY, VALUE, MASK = 0, 1, 2, 3


def ring(call: Call, ways: int) -> Together:
    """Query rows and keys are cut together; shards of keys and values go round the ranks. The columns of a mask stay
    whole.

    Not with dropout (its random masks would have to agree between ranks), nor where there are other numbers of queries
    than of keys, nor where anything but groups of heads is broadcast."""
    arguments, (query, key, value) = given(call), (t.shape for t in call.ins[:3])
    grouped = 1 if arguments["enable_gqa"] else 0
    same = len(query) == len(key) == len(value) > 1 and query[-2] == key[-2] == value[-2] and key[:-2] == value[:-2]
    if not same or arguments["dropout_p"] or query[: -2 - grouped] != key[: -2 - grouped]:
        return ()
    return ((("q", "k"), "ring"),)


def later_rows(site: Site) -> float:
    """Pace of `causal_rows`. The last of n ranks multiplies its 1/n of the rows by all keys, and a causal mask leaves
    half of all pairs: 2 times the mean."""
    return 2.0


def pace(site: Site) -> float:
    """Pace of `ring`. With a causal mask and contiguous chunks, the last of n ranks has n - 1/2 of the n^2 / 2 pairs of
    chunks: (2n - 1) / n times the mean. In halves (zigzag) all ranks have the same."""
    return (2 * site.ways - 1) / site.ways if site.argument("is_causal") and not in_halves(site) else 1.0


def in_halves(site: Site) -> int:
    """Whether rows are in zigzag order, as 1 or 0: the same condition as runtime.algorithms.ring_order.Order.zigzag."""
    return int(site.argument("is_causal") and site.ways > 1 and site.operands[QUERY].sizes[-2] % (2 * site.ways) == 0)


def _hops(site: Site) -> int:
    """Times that shards go to the next rank."""
    return site.ways - 1


def _home(site: Site) -> int:
    """1 if the gradients of keys and values go to the rank that owns these after the last hop."""
    return int(site.ways > 1)


def _all(site: Site) -> float:
    """Bytes of the local shards of queries, keys and values."""
    return site.local_bytes(QUERY) + keys_bytes(site)


def keys_bytes(site: Site) -> float:
    """Bytes of the local shards of keys and values that go round; where another axis has `own_heads`, those of the
    heads that it takes."""
    return site.local_bytes(KEY, VALUE) * _taken(site)


def _taken(site: Site) -> float:
    """The share of the local heads of keys and values that runtime.algorithms.own_heads takes on each rank, for even
    cuts."""
    if not any(option.run == "own_heads" for option in site.options):
        return 1.0
    dim = len(site.operands[QUERY].shape) - 3
    queries, group = round(site.local(QUERY, dim)), site.operands[QUERY].sizes[dim] // site.operands[KEY].sizes[dim]
    taken = queries // group if queries % group == 0 else 1 if group % queries == 0 else queries
    return taken / site.local(KEY, dim)


def _sums(site: Site) -> float:
    """Bytes of the gradients of keys and values, which are summed and sent in float32 or wider."""
    return keys_bytes(site) * max(4, site.operands[KEY].itemsize) / site.operands[KEY].itemsize


def result_bytes(site: Site) -> float:
    """Bytes of the local result: as many rows as the queries have, as wide as the values."""
    lead = range(len(site.operands[QUERY].shape) - 1)
    return (
        site.local(QUERY, *lead)
        * site.local(VALUE, len(site.operands[VALUE].shape) - 1)
        * site.operands[QUERY].itemsize
    )


def _result_and_gradient(site: Site) -> float:
    """Bytes of the result and of its gradient."""
    return 2 * result_bytes(site)


FORWARD = (
    InnerCollective("send", _all, in_halves, reorders=True),
    InnerCollective("send", keys_bytes, _hops, hidden=True),
    InnerCollective("send", result_bytes, in_halves, reorders=True, last=True),
)
BACKWARD = (
    InnerCollective("send", _result_and_gradient, in_halves, reorders=True),
    InnerCollective("send", keys_bytes, _hops, hidden=True),
    InnerCollective("send", _sums, _hops, hidden=True),
    InnerCollective("send", _sums, _home, last=True),
    InnerCollective("send", _all, in_halves, reorders=True, last=True),
)
