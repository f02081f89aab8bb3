"""Where random numbers are drawn does not matter: however a model is cut into stages, its blocks draw masks of their
own, the same ones, and what several stages draw for themselves is one value."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.bundle import Bundle
from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime.rng import Rng
from passes.part_runs import parts_at
from tests.helpers.ranks import on_ranks
from tests.helpers.remat import rematerialised
from tests.helpers.verify import Sizes, Subject, by_recipe, by_stages

ROWS, WIDTH, BLOCKS = 8, 16, 4


class Drops(nn.Module):
    """A block that adds its mask in a digit of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.digit = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(float(2**number)))

    def forward(self, h: Tensor) -> Tensor:
        return h + F.dropout(torch.ones_like(h) + 0 * self.linear(h), 0.5) / 2 * self.digit


class Adds(nn.Module):
    """A block that adds the noise that it is given in a digit of its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.digit = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.tensor(float(2**number)))

    def forward(self, h: Tensor, noise: Tensor) -> Tensor:
        return h + 0 * self.linear(h) + noise * self.digit


class Masks(nn.Module):
    """Blocks with dropout; which masks they had can be read from the second output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Drops(i) for i in range(BLOCKS))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = 0 * self.stem(x)
        for block in self.blocks:
            h = block(h)
        return (h * torch.arange(1, WIDTH + 1)).mean(), h


class Noise(nn.Module):
    """Noise of one batch or of each sample, which all blocks and the loss read. The loss is 0 where that is the same
    everywhere."""

    def __init__(self, each: bool) -> None:
        super().__init__()
        self.stem, self.blocks, self.each = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Adds(i) for i in range(BLOCKS)), each

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn_like(x) if self.each else torch.randn(WIDTH, dtype=x.dtype)
        h = 0 * self.stem(x)
        for block in self.blocks:
            h = block(h, noise)
        return F.mse_loss(h, noise.expand_as(h) * (2**BLOCKS - 1)), h


class _Drawn(Subject):
    def batch(self, batch: int = ROWS, seq: int = 0) -> dict[str, Tensor]:
        return {name: torch.zeros(batch, WIDTH, dtype=torch.float64) for name in self.captured.input_names}


def drawn(model: nn.Module) -> Subject:
    """`model`, captured."""
    model.double()
    return _Drawn(
        "drawn", "train", capture(model, (torch.zeros(ROWS, WIDTH, dtype=torch.float64),)), model.state_dict()
    )


@dataclass(frozen=True)
class Cut:
    """How a model is cut: the ranks of a place, places, microbatches, schedule, stages of a place."""

    ranks: int = 1
    places: int = 1
    microbatches: int = 1
    schedule: str = ""
    virtual: int = 1
    level: str = "none"
    parted: bool = False

    def plan(self, who: Subject) -> tuple[Subject, Plan]:
        """The plan, and `who` as it is for."""
        if self.parted:
            who = replace(
                who,
                captured=who.captured.parted(parts_at(who.captured.gm, {"blocks_0": [1]})),
                cases={},
                references={},
            )
        sizes: Sizes = (self.ranks,)
        recipe = "single" if self.ranks == 1 else "ddp"
        made = (
            by_stages(who, sizes, recipe, self.places, self.microbatches, self.schedule, self.virtual)
            if self.schedule
            else by_recipe(who, sizes, recipe)
        )
        return who, rematerialised(who, replace(made, parted=who.captured.parts), self.level)


CUTS = [
    Cut(),
    Cut(2),
    Cut(1, 2, 1, "naive"),
    Cut(1, 2, 4, "1f1b"),
    Cut(2, 2, 1, "gpipe"),
    Cut(1, 2, 4, "interleaved_1f1b", 2),
    Cut(1, 2, 4, "zbv_zero_bubble", 2),
    Cut(2, 2, 2, "1f1b"),
    Cut(1, 2, 4, "1f1b", level="full"),
    Cut(1, 2, 2, "1f1b", parted=True),
    Cut(parted=True),
]


def _ran(
    plan: Plan, source: str, weights: dict[str, Tensor], batch: dict[str, Tensor]
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """One rank: losses and whole outputs of two forwards, and of two steps the losses; the gradient of a weight behind
    masks."""
    modules = [Bundle(plan, source).build(weights) for _ in range(2)]
    local, outputs, losses = modules[0].shard_batch(**batch), [], []
    for _ in range(2):
        loss, out = modules[0].full(modules[0](*local))
        outputs.append(out.detach().clone())
        losses += [loss.detach().clone(), modules[1].train_step(*local)]
    return losses, outputs, modules[1].full_grads().get("blocks.3.digit")


def ran(who: Subject, plan: Plan) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Losses and outputs, which all ranks have alike, and the gradient of a weight on the ranks that have it."""
    captured = who.captured
    results = on_ranks(
        plan.ranks, _ran, plan, emit(captured.gm, plan, Names.of(captured)), dict(who.weights), who.batch()
    )
    losses, outputs, _ = results[0]
    for other, same, _ in results:
        torch.testing.assert_close(other, losses, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(a, b) for a, b in zip(outputs, same, strict=True))
    return losses, outputs, [grad for _, _, grad in results if grad is not None]


def expected(cut: Cut, step: int, block: int) -> Tensor:
    """The mask of a block in a step: each rank of a place has a piece of the batch, of which each microbatch has the
    next rows."""
    rows = []
    for rank in range(cut.ranks):
        for number in range(cut.microbatches):
            rng = Rng(0, step, microbatch=number, block=block)
            generator = rng.generator(
                "blocks_0/dropout", ("S0",) if cut.ranks > 1 else ("R",), (rank,), torch.device("cpu")
            )
            rows.append(
                torch.empty(ROWS // cut.ranks // cut.microbatches, WIDTH, dtype=torch.bool).bernoulli_(
                    0.5, generator=generator
                )
            )
    return torch.cat(rows)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_mask_of_a_block_is_its_own_wherever_it_runs(cut: Cut) -> None:
    losses, outputs, grads = ran(*cut.plan(drawn(Masks())))
    masks = [[(out.long() >> block) & 1 == 1 for block in range(BLOCKS)] for out in outputs]
    for step, found in enumerate(masks, 1):
        for block, mask in enumerate(found):
            assert torch.equal(mask, expected(cut, step, block)), (step, block)
    flat = [mask for found in masks for mask in found]
    assert len({tuple(mask.flatten().tolist()) for mask in flat}) == 2 * BLOCKS
    # steps of training draw what forwards do
    torch.testing.assert_close(losses[1::2], losses[::2], rtol=1e-12, atol=1e-12)
    weighed = sum((found[3] * torch.arange(1, WIDTH + 1)).double().mean() for found in masks)
    # and so do backwards, also those that run blocks again
    assert grads and all(torch.allclose(grad, weighed) for grad in grads)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("cut", [cut for cut in CUTS if not cut.parted], ids=str)
def test_noise_that_several_stages_read_is_one(cut: Cut, each: bool) -> None:
    losses, outputs, _ = ran(*cut.plan(drawn(Noise(each))))
    assert max(float(loss) for loss in losses) < 1e-20, losses
    first, second = outputs
    assert not torch.equal(first, second)
    rows = {tuple(row.tolist()) for row in first}
    assert len(rows) == (ROWS if each else 1)  # what is for the batch is drawn once, not for each microbatch


def test_totals_are_not_drawn() -> None:
    """A sum over the batch of what is drawn would be of other numbers than microbatches have."""

    class Chosen(Noise):
        def forward(self, x: Tensor) -> Tensor:
            chosen = (torch.rand_like(x) < 0.5).to(x.dtype)
            h = self.stem(x)
            for block in self.blocks:
                h = block(h, x)
            return (h.square() * chosen).sum() / chosen.sum()

    who = drawn(Chosen(each=True))
    with pytest.raises(PlanError, match="so 2 microbatches would not compute what the batch computes"):
        Cut(1, 2, 2, "1f1b").plan(who)
    assert Cut(1, 2, 1, "gpipe").plan(who)[1].places == 2


def test_devices_of_two_kinds_do_not_draw_one_value() -> None:
    who, plan = Cut(1, 2, 2, "1f1b").plan(drawn(Noise(each=False)))
    mixed = replace(plan, cluster=Cluster.parse("h100:1x1+a100-80:1x1").to_dict())
    with pytest.raises(
        PlanError,
        match="draws random numbers that stages 0 and 1 read, each for itself, and these run on devices of two kinds",
    ):
        emit(who.captured.gm, mixed, Names.of(who.captured))
