"""Mixed precision on ranks: computed in bfloat16 or float16, with parameters, sums of gradients and optimizer state in
float32.

The reference is one device that does the same: float32 masters, a copy of each in 16 bits per step, gradients cast
before they add up, in float16 those of the loss times a scale. Rounding differs with the order of sums, so losses and
gradients are compared within bfloat16; what the optimizer makes of given gradients is compared exactly; and lifted to
float64, where nothing is rounded, everything is compared as ever.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._torch import local_of
from autopar.buckets import BUCKET_BYTES
from autopar.bundle import Bundle
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.compiled import Compiled
from autopar.errors import PlanError
from autopar.frontend import load
from autopar.frontend.loading import cast
from autopar.problem.prices import Prices
from autopar.report.reshards import reshards
from autopar.runtime import count
from autopar.runtime.scaling import scaler_for
from autopar.simulate.stages import Stages
from autopar.verify import case_of, verify
from autopar.verify.reference import trainable
from autopar.verify.step import RankCase
from passes.interpret import Interpret
from tests.helpers.captures import captured_once
from tests.helpers.ranks import living
from tests.helpers.tiled import in_tiles
from tests.helpers.tiny import TINY

BATCH, SEQ = 8, 16
RECIPES = ["ddp", "zero1", "zero3", "tp_sp", "1f1b", "zero_bubble"]
COMPUTES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Mixed:
    """One tiny model under a recipe, its float32 weights, and a batch."""

    compiled: Compiled
    weights: dict[str, Tensor]
    batch: dict[str, Tensor]

    @property
    def rank_case(self) -> RankCase:
        return RankCase(self.compiled.plan, self.weights, self.compiled.bundle.constants, self.batch)


@cache
def mixed(recipe: str, name: str = "hf-gpt2", precision: str = "bf16") -> Mixed:
    """Planned for mixed precision on four ranks."""
    loaded = load(TINY[name], batch=BATCH, seq=SEQ, device="cpu", train=True, labels=True)
    with captured_once((name, precision)):
        compiled = autopar.compile(
            loaded.model,
            "cpu:1x4",
            (tuple(loaded.args), dict(loaded.kwargs)),
            precision=precision,
            recipe=recipe,
            time_limit_s=10.0,
        )
    assert compiled.captured is not None
    args, kwargs = cast((loaded.args, loaded.kwargs), COMPUTES[precision])
    batch = dict(zip(compiled.captured.input_names, [*args, *kwargs.values()], strict=True))
    return Mixed(compiled, dict(loaded.model.state_dict()), batch)


@cache
def alone(name: str = "hf-gpt2", precision: str = "bf16") -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two steps on one device under the same policy, and the gradients of the first."""
    what, dtype = mixed("ddp", name, precision), COMPUTES[precision]
    scale = 2.0**16 if precision == "fp16" else 1.0
    captured = what.compiled.captured
    assert captured is not None
    names = trainable(captured.gm)
    masters = {n: what.weights[n].detach().clone().requires_grad_() for n in names}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    losses, first = [], {}
    for _ in range(2):
        leaves = {n: p.detach().to(dtype).requires_grad_() for n, p in masters.items()}
        held = {
            n: w.to(dtype) if w.is_floating_point() else w for n, w in {**what.weights, **captured.constants}.items()
        }
        outputs = Interpret(captured.gm, {**held, **leaves}).run_named(what.batch)
        loss = next(v for v, about in zip(outputs, captured.gm.meta["outputs"], strict=True) if about["kind"] == "loss")
        (loss * scale).backward()
        for n, p in masters.items():
            grad = leaves[n].grad
            p.grad = None if grad is None else grad.float() / scale
        first = first or {n: p.grad.clone() for n, p in masters.items() if p.grad is not None}
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, first


def _trained(
    source: str, rank_case: RankCase
) -> tuple[list[float], dict[str, Tensor], float, dict[str, set[str]], dict[str, int]]:
    """One rank: losses of two steps, whole gradients of the first, how far the parameters after it are from what the
    optimizer makes of them alone, the dtypes of everything, and bytes by kind of collective of parameters."""
    module = rank_case.build(source)
    batch, scaler = module.shard_batch(**rank_case.batch), scaler_for(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with count() as seen:
        losses = [float(module.train_step(*batch, scaler=scaler))]
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
    grads = {n: g.clone() for n, g in module.full_grads().items() if g is not None}
    before = {n: p.clone() for n, p in module.full_state_dict().items()}
    scaler.step(optimizer)
    scaler.update()
    after = module.full_state_dict()
    plain = {n: torch.nn.Parameter(before[n]) for n in grads}
    for n, p in plain.items():
        p.grad = grads[n]
    torch.optim.AdamW(plain.values(), lr=1e-2).step()
    gap = max(float((plain[n] - after[n]).abs().max()) for n in plain)
    held = [h for h in module._held.values() if isinstance(h.tensor, torch.nn.Parameter)]
    dtypes = {
        "rest": {str(h.local.dtype) for h in held},
        "leaf": {str(t.dtype) for h in held for table, key in h.readers for t in [table[key]]},
        "gradient": {str(local_of(p.grad).dtype) for p in module.parameters() if p.grad is not None},
        "state": {str(s["exp_avg"].dtype) for s in optimizer.state.values()},
    }
    optimizer.zero_grad()
    losses.append(float(module.train_step(*batch, scaler=scaler)))
    moved: dict[str, int] = {}
    for item in seen:
        if item.name in module._held:
            moved[item.kind] = moved.get(item.kind, 0) + item.bytes
    return losses, grads, gap, dtypes, moved


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        *((recipe, "bf16") for recipe in RECIPES),
        ("zero1", "fp16"),
        ("tp_sp", "fp16"),
        ("1f1b", "fp16"),
        *(pytest.param(recipe, "fp16", marks=pytest.mark.slow) for recipe in ("ddp", "zero3", "zero_bubble")),
    ],
)
def test_equals_one_device_that_does_the_same(recipe: str, precision: str) -> None:
    what = mixed(recipe, precision=precision)
    losses, grads = alone(precision=precision)
    for got, whole, gap, dtypes, moved in living(4).run(_trained, what.compiled.source, what.rank_case):
        assert got == pytest.approx(losses, rel=2e-2)
        assert gap <= 1e-7
        assert dtypes == {
            "rest": {"torch.float32"},
            "leaf": {str(COMPUTES[precision])},
            "gradient": {"torch.float32"},
            "state": {"torch.float32"},
        }
        for name, grad in whole.items():
            scale = float(grads[name].norm())
            assert float((grad - grads[name]).norm()) <= 0.05 * scale + 1e-4, name
        numel = sum(what.weights[n].numel() for n in grads)
        if recipe == "zero1":  # what is gathered has 16 bits, what is summed float32
            assert moved == {"all_gather": 2 * numel, "reduce_scatter": 4 * numel}
        if recipe == "ddp":
            assert moved == {"all_reduce": 4 * numel}


@pytest.mark.parametrize(
    ("recipe", "precision"), [("zero1", "bf16"), ("zero3", "bf16"), ("1f1b", "bf16"), ("zero3", "fp16")]
)
def test_in_float64_nothing_is_rounded(recipe: str, precision: str) -> None:
    what = mixed(recipe, precision=precision)
    assert what.compiled.captured is not None
    report = verify(case_of(what.compiled.captured, what.compiled.plan, what.weights, what.batch), ranks=living(4))
    assert report.ok, [row for row in report.rows if not row.ok][:5]


def test_small_gradients_add_up() -> None:
    """256 + 1 is 256 in bfloat16: gradients of steps that are not cleared add up in float32."""
    what = mixed("zero1")
    for gaps in living(4).run(_accumulated, what.compiled.source, what.rank_case):
        assert len(gaps) > 1 and max(gaps) < 1e-5  # 2 ** -9 in bfloat16


def _accumulated(source: str, rank_case: RankCase) -> list[float]:
    """One rank: how far each gradient of five steps is from five times that of one, of the greatest of its elements."""
    module = rank_case.build(source)
    batch = module.shard_batch(**rank_case.batch)
    module.train_step(*batch)

    def held() -> list[Tensor]:
        return [local_of(p.grad).clone() for p in module.parameters() if p.grad is not None]

    once = held()
    for _ in range(4):
        module.train_step(*batch)
    return [float((sums - 5 * g).abs().max() / g.abs().max()) for sums, g in zip(held(), once, strict=True) if g.any()]


def _from_images(source: str, rank_case: RankCase) -> list[float]:
    """One rank: losses of float32 images and of the same in 16 bits."""
    module = rank_case.build(source)
    wide, narrow = (
        rank_case.batch,
        {name: value.bfloat16() if value.is_floating_point() else value for name, value in rank_case.batch.items()},
    )
    return [float(module.train_step(*module.shard_batch(**batch))) for batch in (wide, narrow)]


@pytest.mark.parametrize("recipe", ["zero1", "1f1b"])
def test_floating_inputs_are_cast(recipe: str) -> None:
    what = mixed(recipe, "hf-vit")
    images = {name: value.float() if value.is_floating_point() else value for name, value in what.batch.items()}
    for wide, narrow in living(4).run(_from_images, what.compiled.source, replace(what.rank_case, batch=images)):
        assert wide == narrow > 0


def test_names() -> None:
    made = mixed("zero1").compiled
    assert made.plan.precision == "bf16" and 'leaf="R", compute="bfloat16"' in made.source
    loaded = load(TINY["mlp"], batch=BATCH, seq=SEQ, device="cpu", train=True, labels=True)
    given = (tuple(loaded.args), dict(loaded.kwargs))
    pure = autopar.compile(loaded.model, "cpu:1x4", given, precision="bfloat16", recipe="ddp")
    assert pure.plan.precision == "bfloat16" and "compute=" not in pure.source
    assert (
        pure.plan.predicted.memory_bytes
        < autopar.compile(loaded.model, "cpu:1x4", given, precision="bf16", recipe="ddp").plan.predicted.memory_bytes
    )
    narrow = autopar.compile(loaded.model, "cpu:1x4", given, precision="fp16", recipe="ddp")
    assert narrow.plan.precision == "fp16" and 'compute="float16"' in narrow.source
    assert (
        autopar.compile(loaded.model, "cpu:1x4", given, precision="fp16", recipe="ddp", mode="inference").plan.precision
        == "float16"
    )
    with pytest.raises(
        PlanError, match="precision 'fp8' is neither mixed precision \\(bf16, fp16\\) nor a floating dtype"
    ):
        autopar.compile(loaded.model, "cpu:1x4", given, precision="fp8")


def test_weights_in_tiles_equal_one_device_that_does_the_same() -> None:
    """What is gathered in tiles is bfloat16, what is scattered float32."""
    what = mixed("zero3")
    captured = what.compiled.captured
    assert captured is not None
    made = in_tiles(captured, what.compiled.plan, 2)
    losses, grads = alone()
    source = emit(captured.gm, made, Names.of(captured))
    got, whole, gap, dtypes, _ = living(4).run(_trained, source, replace(what.rank_case, plan=made))[0]
    assert got == pytest.approx(losses, rel=2e-2) and gap <= 1e-7 and dtypes["gradient"] == {"torch.float32"}
    assert all(
        float((grad - grads[name]).norm()) <= 0.05 * float(grads[name].norm()) + 1e-4 for name, grad in whole.items()
    )
    seen = living(4).run(_in_tiles, source, replace(what.rank_case, plan=made))[0]
    assert seen["reduce_scatter"] == seen["all_gather"]  # twice in bfloat16, once in float32


def _in_tiles(source: str, rank_case: RankCase) -> Counter[str]:
    """Bytes by kind of collective of tiles in one step."""
    module = rank_case.build(source)
    with count() as seen:
        module.train_step(*module.shard_batch(**rank_case.batch))
    found: Counter[str] = Counter()
    for item in seen:
        found[item.kind] += item.bytes if item.name.startswith("tiled") else 0
    return found


def _members(bundle: Bundle, weights: dict[str, Tensor]) -> list[int]:
    return [len(bucket.members) for bucket in bundle.build(weights)._sync.buckets]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_buckets_are_full_by_what_is_summed(precision: str) -> None:
    """At as many gradients in float32 whatever is computed in: on ranks, in the simulator and in prices, where 16 bits
    made buckets of twice the bytes."""
    layers, x = (
        nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(14)), nn.Flatten(0)),
        torch.randn(8, 1024),
    )
    made = autopar.compile(
        layers, "cpu:1x2", (x,), precision=precision, recipe="ddp", loss_fn=torch.mean, time_limit_s=5.0
    )
    stages = Stages.of(made.captured.gm, made.plan)
    simulated = stages.syncs[0].gradient_buckets(stages.views[0], stages.turns[0])
    assert [len(bucket.members) for bucket in simulated] == [6, 6, 2]
    assert living(2).run(_members, made.bundle, dict(layers.state_dict()))[0] == [6, 6, 2]
    leaf_bytes = 1024 * 1024 * COMPUTES.get(precision, torch.float32).itemsize
    alone = stages.syncs[0].prices
    prices = Prices(alone.mesh, alone.device, alone.settings, bucket_bytes=BUCKET_BYTES)
    assert prices.grad_bucket_bytes(leaf_bytes, 4 * 1024 * 1024) == BUCKET_BYTES
    explained_s = sum(row.step_s for row in reshards(stages.syncs[0].program, made.plan) if row.role == "sync")
    assert explained_s == pytest.approx(sum(piece.seconds for bucket in simulated for piece in bucket.sums), rel=0.02)
