"""Weights that are gathered in tiles, against one device in float64: the products on ranks with what they send, and
whole plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import onestage
from autopar.bundle import Bundle
from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.errors import InfeasibleError, RunError
from autopar.memory import predict
from autopar.plan import Plan
from autopar.problem.read_graph import read
from autopar.problem.tiling import tiled
from autopar.recipes import roles
from autopar.request import Request
from autopar.runtime import Mesh, count
from autopar.runtime.algorithms import tiled_embedding, tiled_linear, tiled_matmul
from autopar.runtime.cuts import own
from autopar.verify import Report, case_of, verify
from models.mlp import build
from passes import ops
from tests.helpers.peak import beside_state, counted_on_rank
from tests.helpers.ranks import living, on_ranks
from tests.helpers.remat import rematerialised
from tests.helpers.tiled import in_tiles
from tests.helpers.verify import Sizes, Subject, by_recipe, by_roles, by_stages, right, subject


def _embeddings(sizes: tuple[int, ...], axis: int, tiles: int, padding: int) -> None:
    """Ids cut over all axes, the table over one of them."""
    mesh = Mesh(sizes, ("x", "y")[: len(sizes)], "cpu")
    rows, rests = tuple("S0" for _ in sizes), tuple("S0" if a == axis else "R" for a in range(len(sizes)))
    torch.manual_seed(0)
    table, ids, pull = _drawn(24, 5).requires_grad_(), torch.randint(0, 24, (8, 7)), _drawn(8, 7, 5)
    wanted = F.embedding(ids, table, padding_idx=padding if padding >= 0 else None)
    wanted.backward(pull)
    shard = own(table.detach(), rests, mesh.sizes, mesh.coord).clone().requires_grad_()
    with count() as seen:
        got = tiled_embedding(
            own(ids, rows, mesh.sizes, mesh.coord), shard, padding, tiles=tiles, axes=(axis,), mesh=mesh
        )
        got.backward(own(pull, rows, mesh.sizes, mesh.coord))
    _close(got, own(wanted, rows, mesh.sizes, mesh.coord))
    total = shard.grad
    for other in range(len(sizes)):
        if rests[other] == "R":
            torch.distributed.all_reduce(total, group=mesh.group(other))
    _close(total, own(table.grad, rests, mesh.sizes, mesh.coord))
    tile = 24 * 5 * 8 // tiles
    assert Counter((item.kind, item.axis, item.bytes) for item in seen) == {
        ("all_gather", axis, tile): tiles,
        ("reduce_scatter", axis, tile): tiles,
    }


@pytest.mark.parametrize(
    ("sizes", "axis", "tiles", "padding"), [((2,), 0, 3, -1), ((4,), 0, 2, 5), ((2, 2), 1, 2, -1), ((2, 2), 0, 4, 13)]
)
def test_lookups_equal_one_device(sizes: tuple[int, ...], axis: int, tiles: int, padding: int) -> None:
    on_ranks(math.prod(sizes), _embeddings, sizes, axis, tiles, padding)


PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "linear": F.linear,
    "linear with bias": F.linear,
    "matmul": torch.matmul,
    "matmul with bias": ops.affine,
}


def _drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def _products(
    sizes: tuple[int, ...],
    axis: int,
    tiles: int,
    kind: str,
    trained: tuple[bool, bool],
    dtype: torch.dtype = torch.float64,
) -> None:
    """Rows of x cut over all axes, the weight over one of them: result and gradients of one device, in so many
    collectives."""
    mesh = Mesh(sizes, ("x", "y")[: len(sizes)], "cpu")
    rows, rests = tuple("S0" for _ in sizes), tuple("S0" if a == axis else "R" for a in range(len(sizes)))
    torch.manual_seed(0)
    x, weight, added, pull = (_drawn(*shape, dtype=dtype) for shape in ((8, 3, 24), (24, 24), (24,), (8, 3, 24)))
    bias = added if "bias" in kind else None
    whole = [
        t if t is None else t.clone().requires_grad_(on)
        for t, on in zip((x, weight, bias), (*trained, True), strict=True)
    ]
    wanted = PRODUCTS[kind](*(t for t in whole if t is not None))
    part = own(x, rows, mesh.sizes, mesh.coord).clone().requires_grad_(trained[0])
    shard = own(weight, rests, mesh.sizes, mesh.coord).clone().requires_grad_(trained[1])
    local = None if bias is None else bias.clone().requires_grad_()
    with count() as seen:
        if kind.startswith("matmul"):
            got = tiled_matmul(part, shard, local, tiles=tiles, axes=(axis,), mesh=mesh)
        else:
            got = tiled_linear(part, shard, local, tiles=tiles, axes=(axis,), mesh=mesh)
        _close(got, own(wanted, rows, mesh.sizes, mesh.coord))
        if got.requires_grad:
            wanted.backward(pull)
            got.backward(own(pull, rows, mesh.sizes, mesh.coord))
    if trained[0]:
        _close(part.grad, own(whole[0].grad, rows, mesh.sizes, mesh.coord))
    for mine, theirs, layout in ((shard, whole[1], rests), (local, whole[2], tuple("R" for _ in sizes))):
        if mine is not None and mine.requires_grad:
            total = mine.grad.clone()
            for other in range(len(sizes)):
                if layout[other] == "R":
                    torch.distributed.all_reduce(total, group=mesh.group(other))
            _close(total, own(theirs.grad, layout, mesh.sizes, mesh.coord))
    ran = Counter((item.kind, item.axis, item.bytes) for item in seen)
    tile = 24 * 24 * dtype.itemsize // tiles
    assert (
        ran
        == Counter(
            {
                ("all_gather", axis, tile): tiles * (2 if trained[0] else 1),
                ("reduce_scatter", axis, tile): tiles * trained[1],
            }
        )
        + Counter()
    )


def _close(got: Tensor | None, wanted: Tensor | None) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize(
    ("sizes", "axis", "tiles"), [((2,), 0, 1), ((2,), 0, 4), ((4,), 0, 3), ((2, 2), 1, 2), ((2, 2), 0, 2)]
)
def test_products_equal_one_device(kind: str, sizes: tuple[int, ...], axis: int, tiles: int) -> None:
    on_ranks(math.prod(sizes), _products, sizes, axis, tiles, kind, (True, True))


@pytest.mark.parametrize("kind", PRODUCTS)
def test_products_of_complex_numbers_equal_one_device(kind: str) -> None:
    on_ranks(2, _products, (2,), 0, 2, kind, (True, True), torch.complex128)


@pytest.mark.parametrize("kind", ["linear", "matmul"])
@pytest.mark.parametrize("trained", [(False, True), (True, False), (False, False)])
def test_what_has_no_gradient_is_not_gathered_again_or_scattered(kind: str, trained: tuple[bool, bool]) -> None:
    on_ranks(2, _products, (2,), 0, 2, kind, trained)


def test_tiles_that_do_not_divide_a_shard_are_refused() -> None:
    with pytest.raises(RunError, match="5 tiles do not divide the 12 rows that a rank has of the weight"):
        tiled_linear(_drawn(2, 4), _drawn(12, 4), tiles=5, axes=(0,), mesh=Mesh((2,), ("x",), "cpu"))
    with pytest.raises(RunError, match=r"one mesh axis, got \(0, 1\)"):
        tiled_linear(_drawn(2, 4), _drawn(12, 4), tiles=2, axes=(0, 1), mesh=Mesh((2, 2), ("x", "y"), "cpu"))


ROLES: dict[str, tuple[Sizes, tuple[roles.Role, ...]]] = {
    "zero3 on 4": ((4,), (roles.zero3,)),
    "ddp x zero3": ((2, 2), (roles.data, roles.zero3)),
    "zero1 x zero3": ((2, 2), (roles.zero1, roles.zero3)),
    "zero3 x zero3": ((2, 2), (roles.zero3, roles.zero3)),
    "zero3 x tp_sp": ((2, 2), (roles.zero3, roles.tensor_sequence)),
}
FAST = [("gpt", "zero1 x zero3")]
# uneven biases
REFUSED = [
    ("mlp", "zero3 x tp_sp"),
    *((name, how) for name in ("hf-bert", "hf-vit", "mlp") for how in ("zero1 x zero3", "zero3 x zero3")),
]
SLOW = [
    case
    for name in ("hf-gpt2", "hf-llama", "hf-t5", "hf-bert", "hf-vit", "gpt", "mlp")
    for how in ROLES
    if (case := (name, how)) not in (*FAST, *REFUSED)
]

PIPES = [
    ("hf-gpt2", "1f1b", 1),  # matmuls, and a head that is tied to the embedding of another stage
    pytest.param("hf-llama", "zbv_zero_bubble", 2, marks=pytest.mark.slow),
    pytest.param("hf-t5", "interleaved_1f1b", 2, marks=pytest.mark.slow),
    pytest.param("hf-llama", "interleaved_zero_bubble", 2, marks=pytest.mark.slow),
]


def _right(report: Report, made: Plan) -> None:
    assert tiled(made.runs)
    right(report)


@pytest.mark.parametrize(("name", "how"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_plans_equal_one_device(name: str, how: str) -> None:
    who, (sizes, used) = subject(name), ROLES[how]
    made = in_tiles(who.captured, by_roles(who, sizes, used, how), 2)
    assert Plan.from_json(made.to_json()) == made
    _right(who.verified(made), made)


class Words(nn.Module):
    """A table that is looked up in and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 32, padding_idx=3)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 1024, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.mix(self.words(ids)))).flatten(0, 1), ids.roll(1, 1).flatten())


def test_a_tied_table_is_looked_up_in_tiles() -> None:
    """By what memory wants; by hand also where its other reader gathers it whole."""
    torch.manual_seed(0)
    model, ids = Words(), torch.randint(0, 1024, (4, 2))
    captured = capture(model, (ids,))

    def zero3(memory_bytes: float) -> Plan:
        request = Request(Cluster.parse("cpu:1x4"), recipe="zero3", memory_bytes=memory_bytes)
        return onestage.plan(captured.gm, captured.hints, request, model="words", graph_hash=captured.graph_hash)

    free = zero3(1e12)
    by_hand, found = in_tiles(captured, free, 4), zero3(0.8 * free.predicted.memory_bytes)
    lookup = next(name for name, runs in by_hand.runs.items() if runs[0] == "lookup_tiles4")
    whole = replace(
        by_hand, nodes={**by_hand.nodes, **{name: free.nodes[name] for name in tiled(by_hand.runs) if name != lookup}}
    )
    assert (
        not tiled(free.runs)
        and found.runs[lookup][0].startswith("lookup_tiles")
        and "words.weight in" in found.notes[0]
    ), found.notes
    for made in (found, by_hand, whole):
        _right(
            verify(case_of(captured, made, model.state_dict(), {captured.input_names[0]: ids}), ranks=living(4)), made
        )


@pytest.mark.parametrize(("name", "schedule", "virtual"), PIPES)
def test_pipelines_equal_one_device(name: str, schedule: str, virtual: int) -> None:
    who = subject(name)
    made = in_tiles(who.captured, by_stages(who, (2,), (roles.zero3,), 2, 4, schedule, virtual), 2)
    _right(who.verified(made), made)


@pytest.mark.parametrize(
    ("name", "level"), [("hf-llama", "selective"), pytest.param("hf-gpt2", "full", marks=pytest.mark.slow)]
)
def test_blocks_that_are_run_again_equal_one_device(name: str, level: str) -> None:
    who = subject(name)
    made = rematerialised(who, in_tiles(who.captured, by_recipe(who, (2,), "zero3"), 2), level)
    _right(who.verified(made), made)


def test_errors_are_found() -> None:
    """Another number of tiles computes the same with other collectives; tiles of the wrong axis do not fit together."""
    who = subject("mlp")
    made = in_tiles(who.captured, by_roles(who, (2, 2), (roles.data, roles.zero3), "hsdp"), 4)
    other = verify(replace(who.case(made), mutate=lambda text: text.replace("tiles=4", "tiles=2", 1)), ranks=living(4))
    assert {row.kind for row in other.rows if not row.ok} == {"collectives"}
    wrong = verify(
        replace(who.case(made), mutate=lambda text: text.replace("tiles=4, axes=(1,)", "tiles=4, axes=(0,)", 1)),
        ranks=living(4),
    )
    assert {row.kind for row in wrong.rows if not row.ok} >= {"loss", "gradient", "parameter"}


WIDE = 512


class Wide(Subject):
    """An MLP of two wide layers."""

    def batch(self, batch: int = 16, seq: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(1)
        return dict(zip(self.captured.input_names, build(64, WIDE, 2, 10, batch)[1], strict=True))


@cache
def wide() -> Wide:
    """Nearly all of its memory are the two layers."""
    torch.manual_seed(0)
    model, args = build(64, WIDE, 2, 10, 16)
    return Wide("wide", "train", capture(model, args), model.state_dict())


def _limited(limit_bytes: float, ranks: int = 2) -> Plan:
    """ZeRO-3 where a device has so many bytes."""
    who = wide()
    request = Request(Cluster.parse(f"cpu:1x{ranks}"), recipe="zero3", memory_bytes=limit_bytes)
    return onestage.plan(
        who.captured.gm, {**who.captured.hints, "b": 16}, request, model="wide", graph_hash=who.captured.graph_hash
    )


def test_the_peak_of_a_step_is_counted() -> None:
    """Gloo holds copies of what it moves, here of the largest weights there are: less is counted with tiles as less is
    predicted, and where activations are most the peak is as predicted."""
    who = wide()
    plain, tiles = _limited(1e12), in_tiles(who.captured, _limited(1e12), 8)
    predicted, counted = zip(*(_peaks(who, made, {"b": 16}) for made in (plain, tiles)), strict=True)
    assert predicted[1] < 0.5 * predicted[0] and counted[1] < 0.7 * counted[0]
    predicted_bytes, counted_bytes = _peaks(who, tiles, {"b": 4096})
    assert predicted_bytes == pytest.approx(counted_bytes, rel=0.1)


def _peaks(who: Wide, made: Plan, hints: dict[str, int]) -> tuple[float, float]:
    """Bytes of a step beside what rests, predicted and counted on the first rank."""
    bundle = Bundle(made, emit(who.captured.gm, made, Names.of(who.captured)), who.captured.constants)
    seen = living(2).run(counted_on_rank, bundle, dict(who.weights), who.batch(hints["b"]))
    (place,) = predict(read(who.captured.gm, {**who.captured.hints, **hints}, training=True, device="cpu"), made).places
    return beside_state(place, "forward", "backward"), seen[0]


def test_zero3_takes_tiles_where_it_does_not_fit_otherwise() -> None:
    free = _limited(1e12)
    assert not tiled(free.runs)
    made = _limited(0.8 * free.predicted.memory_bytes)
    assert set(tiled(made.runs)) == {"layers_0/linear_default_1"} and "linear.weight in" in made.notes[0]
    assert (
        made.predicted.memory_bytes <= 0.8 * free.predicted.memory_bytes
        and made.predicted.step_s >= free.predicted.step_s
    )
    _right(wide().verified(made, 16, 0), made)
    with pytest.raises(InfeasibleError):
        _limited(0.3 * free.predicted.memory_bytes)  # less than what rests
