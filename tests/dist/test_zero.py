"""ZeRO-1 and 2: parameters that rest cut and are gathered once per step, against one device in float64; a leaf is never
stale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from autopar import joint, onestage
from autopar._torch import local_of
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.layout import most_elements
from autopar.plan import Plan
from autopar.problem.pairs import LayoutPair
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.runtime import Mesh, Param, ShardedModule, count, gradsync
from autopar.runtime.gradient_buckets import Bucket
from autopar.runtime.gradsync import GradSync
from autopar.runtime.params import Held
from autopar.verify.reference import trainable
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import Sizes, by_recipe, by_roles, by_stages, right, subject
from tests.helpers.zero_plans import ROLES, offloaded

FAST = [
    ("hf-gpt2", "zero1 on 4"),
    ("hf-llama", "zero1 x tp"),
    ("hf-t5", "zero2 on 4"),
    ("gpt", "ddp x zero1"),
    ("gpt", "zero1 x zero3"),
    ("gpt", "zero1 x zero1"),
]
HOSTED = [  # model, roles, schedule, stages per place, what is on the host
    ("hf-gpt2", (roles.zero1,), "1f1b", 1, "optimizer"),
    ("hf-gpt2", (roles.data,), "zbv_zero_bubble", 2, "parameters"),  # both copies of the tied weight on one place
    # scattered after every microbatch; tied over both places
    ("hf-gpt2", (roles.zero2,), "interleaved_1f1b", 2, "parameters"),
]
SLOW_HOSTED = [
    case
    for name in ("hf-gpt2", "hf-llama")
    for used in ((roles.data,), (roles.zero1,), (roles.zero2,), (roles.zero3,))
    for schedule, virtual in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_zero_bubble", 2),
        ("zbv_zero_bubble", 2),
        ("dualpipev", 2),
    )
    for held in ("optimizer", "parameters")
    if (case := (name, used, schedule, virtual, held)) not in HOSTED
]
# a bias of ten: not over two and two
REFUSED = [("mlp", "zero1 x zero3")]
SLOW_REFUSED = [
    case
    for name in ("mlp", "hf-resnet", "hf-vit")
    for how in ("zero1 x zero1", "zero1 x zero3")
    if (case := (name, how)) not in REFUSED
]
SLOW = [
    case
    for name in ("hf-gpt2", "hf-llama", "hf-t5", "hf-resnet", "hf-vit", "moe", "gpt")
    for how in ROLES
    if (case := (name, how)) not in (*FAST, *REFUSED, *SLOW_REFUSED)
]

# model, mesh of a place, roles, places, microbatches, schedule, stages per place
ZERO1, ZERO2, ZERO3 = (roles.zero1,), (roles.zero2,), (roles.zero3,)
PIPES = [
    ("hf-gpt2", (2,), ZERO1, 2, 4, "1f1b", 1),  # tied over both places
    # gradients go after each part of a backward that is taken apart
    ("hf-gpt2", (2,), ZERO2, 2, 4, "zbv_zero_bubble", 2),
    ("hf-llama", (2,), ZERO1, 2, 4, "interleaved_1f1b", 2),
    ("gpt", (2,), ZERO1, 2, 1, "naive", 1),
    ("gpt", (2,), ZERO2, 1, 2, "gpipe", 1),  # microbatches alone
    ("gpt", (2,), ZERO3, 1, 4, "gpipe", 1),
]
SLOW_PIPES = [
    ("hf-resnet", (2,), ZERO1, 2, 1, "naive", 1),
    *[
        (name, (2,), used, 2, 4, schedule, virtual)
        for name in ("hf-gpt2", "hf-llama", "hf-t5", "hf-vit")
        for used in (ZERO1, ZERO2)
        for schedule, virtual in (
            ("1f1b", 1),
            ("interleaved_1f1b", 2),
            ("gpipe", 1),
            ("interleaved_zero_bubble", 2),
            ("dualpipev", 2),
        )
    ],
    *[
        (name, (2, 2), (used[0], roles.tensor), 2, 2, schedule, virtual)
        for name in ("hf-gpt2", "hf-llama")
        for used in (ZERO1, ZERO2, ZERO3)
        for schedule, virtual in (("1f1b", 1), ("interleaved_1f1b", 2))
    ],
]


@pytest.mark.parametrize(("name", "how"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_equals_one_device(name: str, how: str) -> None:
    who, (sizes, used) = subject(name), ROLES[how]
    made = by_roles(who, sizes, used, how)
    assert any(LayoutPair.of(node.outs[0]).gathered for node in made.nodes.values() if node.outs and not node.ins)
    right(who.verified(made))


@pytest.mark.parametrize(
    ("name", "how"), [*REFUSED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_REFUSED)]
)
def test_a_parameter_that_two_axes_cannot_cut_evenly_is_named(name: str, how: str) -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"(classifier|head)\w*_bias .* has no option left on a mesh of \(2, 2\): .*sizes \[\(10,\)\]",
    ):
        by_roles(subject(name), *ROLES[how], how)


@pytest.mark.parametrize(
    ("name", "sizes", "used", "places", "microbatches", "schedule", "virtual"),
    [*PIPES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_PIPES)],
)
def test_pipelines_equal_one_device(
    name: str, sizes: Sizes, used: tuple[roles.Role, ...], places: int, microbatches: int, schedule: str, virtual: int
) -> None:
    who = subject(name)
    right(who.verified(by_stages(who, sizes, used, places, microbatches, schedule, virtual)))


@pytest.mark.parametrize(
    ("name", "sizes"), [("hf-gpt2", (4,)), ("gpt", (1,)), pytest.param("hf-llama", (2,), marks=pytest.mark.slow)]
)
def test_parameters_that_rest_on_the_host_equal_one_device(name: str, sizes: Sizes) -> None:
    who = subject(name)
    made = offloaded(who, sizes)
    assert made.offload == "parameters" and made.strategy == "zero_offload" and Plan.from_json(made.to_json()) == made
    assert "host=True" in who.case(made).source()
    right(who.verified(made))


@pytest.mark.parametrize(
    ("name", "sizes"), [("hf-gpt2", (4,)), ("gpt", (1,)), pytest.param("hf-t5", (2,), marks=pytest.mark.slow)]
)
def test_optimizer_state_on_the_host_equals_one_device(name: str, sizes: Sizes) -> None:
    who = subject(name)
    made = offloaded(who, sizes, "optimizer_offload")
    assert (
        made.offload == "optimizer" and made.strategy == "optimizer_offload" and Plan.from_json(made.to_json()) == made
    )
    assert "host_state=True" in who.case(made).source()
    right(who.verified(made))


@pytest.mark.parametrize("held", ["optimizer", "parameters"])
@pytest.mark.parametrize(
    ("name", "recipe", "sizes"),
    [
        ("hf-gpt2", "zero3", (4,)),
        ("hf-gpt2", "tp_zero3", (2, 2)),
        pytest.param("hf-llama", "megatron", (4,), marks=pytest.mark.slow),
        pytest.param("hf-llama", "ddp", (2,), marks=pytest.mark.slow),
        pytest.param("cnn", "zero3", (4,), marks=pytest.mark.slow),
    ],
)
def test_any_layout_may_rest_on_the_host(name: str, recipe: str, sizes: Sizes, held: str) -> None:
    """What the search may choose where devices are short of memory."""
    who = subject(name)
    request = Request(
        Cluster.parse(f"cpu:1x{math.prod(sizes)}"),
        Settings(who.mode, offload=held),
        recipe=recipe,
        mesh=sizes,
        time_limit_s=20.0,
    )
    made = onestage.plan(
        who.captured.gm, who.captured.hints, request, model=who.name, graph_hash=who.captured.graph_hash
    )
    assert (
        made.offload == held
        and {"optimizer": "host_state=True", "parameters": "host=True"}[held] in who.case(made).source()
    )
    right(who.verified(made))


@pytest.mark.parametrize(
    ("name", "used", "schedule", "virtual", "held"),
    [*HOSTED, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_HOSTED)],
)
def test_pipelines_on_the_host_equal_one_device(
    name: str, used: tuple[roles.Role, ...], schedule: str, virtual: int, held: str
) -> None:
    who = subject(name)
    right(who.verified(replace(by_stages(who, (2,), used, 2, 4, schedule, virtual), offload=held)))


def _to_the_host(source: str, rank_case: RankCase) -> tuple[list[str], list[str]]:
    """One rank: whose gradients go to `param.grad` in a step, each time that they do; and whose are there."""
    module, went = rank_case.build(source), list[str]()

    def deposit(held: Held, grads: Sequence[Tensor]) -> None:
        went.append(held.name)
        real(held, grads)

    real = gradsync.deposit
    with patch.object(gradsync, "deposit", deposit):
        module.train_step(*module.shard_batch(**rank_case.batch))
    return went, [name for name, p in module.named_parameters() if p.grad is not None]


def test_gradients_go_to_the_host_once_in_a_step() -> None:
    """Those of four microbatches add up on the device, though they are scattered after each."""
    who = subject("hf-gpt2")
    case = who.case(replace(by_stages(who, (2,), (roles.zero2,), 2, 4, "1f1b"), offload="parameters"))
    for went, there in living(4).run(_to_the_host, case.source(), case.rank_case):
        assert there and sorted(went) == sorted(there)


def _began(source: str, rank_case: RankCase) -> tuple[int, list[float]]:
    """One rank: how many buckets there are, and for each reduction the share of gradients that were there when it
    began in a backward, 2 where it began behind it."""
    module, shares = rank_case.build(source), list[float]()
    for sync in module._syncs:
        sync.fill(list({held.name: held for held in sync.held_of.values()}.values()), 50_000)

    def start(sync: GradSync, bucket: Bucket) -> None:
        shares.append(2.0 if sync.deferred else len(sync.reached) / len(sync.order))
        real(sync, bucket)

    real = GradSync._start
    with patch.object(GradSync, "_start", start):
        module.train_step(*module.shard_batch(**rank_case.batch))
    return sum(len(sync.buckets) for sync in module._syncs), shares


@pytest.mark.parametrize("recipe", ["ddp", "zero1"])
def test_gradients_of_several_microbatches_are_summed_beside_the_last_backward(recipe: str) -> None:
    """Each once; they were summed when it had ended."""
    who = subject("hf-gpt2")
    case = who.case(by_stages(who, (2,), recipe, 1, 4, "gpipe"))
    for buckets, shares in living(2).run(_began, case.source(), case.rank_case):
        assert len(shares) == buckets > 2 and shares == sorted(shares)
        assert shares[0] < 0.5 and shares[-1] <= 1.0


@pytest.mark.slow
def test_the_search_rests_on_the_host_what_does_not_fit() -> None:
    """Found without being asked for, and right on ranks of the CPU: the optimizer's state leaves no room on a device
    for what blocks keep."""
    who = subject("hf-gpt2")
    request = Request(Cluster.parse("h100:1x4"), Settings(who.mode), mesh=(4,), memory_bytes=1e6, time_limit_s=90.0)
    made = joint.plan(who.captured.gm, who.captured.hints, request, model=who.name, graph_hash=who.captured.graph_hash)
    assert made.offload and "on the host" in made.notes[-1], made.notes
    right(who.verified(replace(made, cluster=Cluster.parse("cpu:1x4").to_dict())))


@pytest.mark.slow
def test_the_search_finds_pipelines_on_the_host() -> None:
    """Between two nodes with a slow network, for devices that have no room for the optimizer's state; right on ranks of
    the CPU."""
    who, cluster = subject("hf-gpt2"), Cluster.parse("h100:2x1")
    slow = replace(cluster, levels=(replace(cluster.levels[0], bandwidth_bytes_s=1e6), cluster.levels[1]))
    request = Request(slow, Settings(who.mode), memory_bytes=1.2e6, time_limit_s=90.0)
    made = joint.plan(who.captured.gm, who.captured.hints, request, model=who.name, graph_hash=who.captured.graph_hash)
    assert made.offload and made.places == 2, made.notes
    right(who.verified(replace(made, cluster=Cluster.parse("cpu:1x2").to_dict())))


def test_plans_say_when_gradients_are_scattered() -> None:
    for recipe, run in (("zero1", ""), ("zero2", "each")):
        made = by_recipe(subject("gpt"), (4,), recipe)
        held = [
            node for node in made.nodes.values() if node.outs and not node.ins and LayoutPair.of(node.outs[0]).gathered
        ]
        assert held and {node.runs for node in held} == {(run,)}


# -- a whole life: accumulation, clipping, evaluation, edits, loading


# -- bytes and collectives


def _held(module: ShardedModule) -> int:
    """Bytes of parameters, leaves and gradients on this rank."""
    own = [
        t
        for h in module._held.values()
        if isinstance(h.tensor, torch.nn.Parameter)
        for t in (
            h.local,
            *([h.leaf] if h.info.apart else []),
            *([] if h.tensor.grad is None else [local_of(h.tensor.grad)]),
            h.leaf.grad,
        )
    ]
    return sum(t.nbytes for t in own if t is not None)


def _counted(source: str, rank_case: RankCase) -> tuple[int, dict[str, int]]:
    module = rank_case.build(source)
    with count() as seen:
        module.train_step(*module.shard_batch(**rank_case.batch))
    kinds = [item.kind for item in seen if item.name in module._held]
    return _held(module), {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


def test_what_a_rank_holds_and_how_often_it_talks() -> None:
    """Shard, whole leaf, shard of the gradient; one gather and one scatter per parameter."""
    who = subject("hf-gpt2")
    case = who.case(by_recipe(who, (4,), "zero1"))
    for held, kinds in living(4).run(_counted, case.source(), case.rank_case):
        params = [p for n, p in case.weights.items() if n in trainable(case.gm)]
        whole = sum(p.numel() for p in params)
        longest = sum(min(most_elements(tuple(p.shape), (f"S{d}",), (4,)) for d in range(p.dim())) for p in params)
        assert 8 * (whole + 2 * whole / 4) * 0.99 < held < 8 * (whole + 2 * longest) * 1.02
        assert kinds == {"all_gather": len(params), "reduce_scatter": len(params)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_an_accelerator_what_rests_is_pinned_on_the_host() -> None:
    """One device: the leaf is there, the parameter and its gradient are not, and a step is that of the CPU."""

    class Model(ShardedModule):
        MESH = Mesh((1,), ("x",), "cuda")
        INPUTS: ClassVar = {"x": "R"}
        OUTPUTS = (("loss", "loss"),)
        PARAMS: ClassVar = {"w": Param((8, 4), "float32", "R", host=True)}

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (torch.nn.functional.linear(x, self.w["w"]).square().sum(),)

    weight, x = torch.randn(8, 4), torch.randn(3, 4)
    alone = weight.clone().requires_grad_()
    model = Model().load_full({"w": weight})
    held = dict(model.named_parameters())["w"]
    for _ in range(2):
        torch.nn.functional.linear(x, alone).square().sum().backward()
        model.train_step(x.cuda())
        assert (
            held.grad is not None
            and local_of(held).is_pinned()
            and local_of(held.grad).device.type == "cpu"
            and model.w["w"].is_cuda
        )
        torch.testing.assert_close(local_of(held.grad), alone.grad, rtol=1e-4, atol=1e-4)
        for parameter in (held, alone):
            torch.optim.AdamW([parameter], lr=1e-2).step()
            parameter.grad = None
    torch.testing.assert_close(local_of(held).detach(), alone.detach(), rtol=1e-4, atol=1e-4)
