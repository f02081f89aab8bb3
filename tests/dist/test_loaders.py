"""Each rank loads samples of its own with torch's DistributedSampler: an epoch gives the weights of one device that
takes the same batches."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from autopar.compiled import Compiled
from autopar.errors import RunError
from tests.helpers.captures import captured_once
from tests.helpers.ranks import living

WIDTH, WORDS, SEQ, BATCH, SAMPLES = 16, 32, 8, 8, 32


class Model(nn.Module):
    """Words, two blocks with a sum over positions, a loss of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = x + block(x) + x.mean(1, keepdim=True)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randint(WORDS, (SAMPLES, SEQ), generator=generator) for _ in range(2)))


@cache
def compiled(recipe: str) -> Compiled:
    torch.manual_seed(0)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with captured_once(Model):
        return autopar.compile(Model().double(), "cpu:1x4", (ids, ids), recipe=recipe, time_limit_s=10.0)


def _epoch(made: Compiled, weights: dict[str, Tensor]) -> tuple[int, int, list[float], dict[str, Tensor]]:
    """One rank: its share, the losses of an epoch, and the weights behind it."""
    model = made.bundle.build(weights)
    ways, number = model.data_parallel_size, model.data_parallel_rank
    loader = DataLoader(
        dataset(),
        batch_size=BATCH // ways,
        sampler=DistributedSampler(dataset(), num_replicas=ways, rank=number, shuffle=False),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in loader:
        losses.append(float(model.train_step(*model.shard_loaded(*batch))))
        optimizer.step()
        optimizer.zero_grad()
    return ways, number, losses, model.full_state_dict()


def alone(ways: int) -> tuple[list[float], dict[str, Tensor]]:
    """One device on the batches that so many samplers give together."""
    torch.manual_seed(0)
    model, losses = Model().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loaders = [
        DataLoader(
            dataset(),
            batch_size=BATCH // ways,
            sampler=DistributedSampler(dataset(), num_replicas=ways, rank=number, shuffle=False),
        )
        for number in range(ways)
    ]
    for parts in zip(*loaders, strict=True):
        loss = model(*(torch.cat(each) for each in zip(*parts, strict=True)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("recipe", "ways"),
    [("ddp", 4), ("zero3", 4), ("tp_sp", 1), ("tp_zero3", 2), ("1f1b", None), ("cp", None), ("3d", None)],
)
def test_an_epoch_equals_one_device(recipe: str, ways: int | None) -> None:
    made = compiled(recipe)
    torch.manual_seed(0)
    weights = dict(Model().double().state_dict())
    ran = living(4).run(_epoch, Compiled(made.bundle), weights)
    found = ran[0][0]
    assert ways in (None, found) and {number for _, number, _, _ in ran} == set(range(found))
    losses, state = alone(found)
    for size, _, got, behind in ran:
        assert size == found and got == pytest.approx(losses, rel=1e-9)
        assert all(torch.allclose(value, state[name], rtol=1e-9, atol=1e-9) for name, value in behind.items())


def _unlike(made: Compiled, weights: dict[str, Tensor], who: int) -> tuple[list[str], list[float], float]:
    """One rank: what is said of steps for which rank `who` has a smaller batch than the others, in training and in
    evaluation; losses of other sizes in between, and of the same again."""
    model = made.bundle.build(weights)
    batch = model.shard_batch(*dataset()[:BATCH])
    first, said, losses = float(model.train_step(*batch).detach()), [], []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RunError) as error:
            model(*(x[:1] if torch.distributed.get_rank() == who else x for x in batch))
        said.append(str(error.value))
        losses.append(float(model.train_step(*model.shard_batch(*dataset()[BATCH : BATCH + BATCH // 2]))))
    return said, losses, abs(float(model.train_step(*batch)) - first)


# the last part of a batch that does not divide is smaller, too
@pytest.mark.parametrize(("recipe", "who"), [("ddp", 2), ("ddp", 3), ("zero3", 0), ("1f1b", 3)])
def test_unlike_sizes_are_refused_in_every_step(recipe: str, who: int) -> None:
    made = compiled(recipe)
    torch.manual_seed(0)
    weights = dict(Model().double().state_dict())
    for said, losses, apart in living(4).run(_unlike, Compiled(made.bundle), weights, who):
        assert all(
            "input 'ids': the ranks' parts do not fit together" in text and f"rank {who}: (1, {SEQ})" in text
            for text in said
        )
        assert len(set(losses)) == 1 and apart < 1e-9


def _in_another_step(made: Compiled, weights: dict[str, Tensor], name: str) -> str:
    """One rank: what is said of a step that the last rank takes in another state than the others."""
    model = made.bundle.build(weights)
    batch, other = model.shard_batch(*dataset()[:BATCH]), torch.distributed.get_rank() == 3
    model.train_step(*batch)
    if name == "model.training":
        model.train(not other)
    if name.startswith("rng_state()"):
        key = "seed" if "seed" in name else "step"
        model.set_rng_state({**model.rng_state(), key: 7 if other else 5})
    with pytest.raises(RunError) as error, torch.set_grad_enabled(name != "torch.is_grad_enabled()" or not other):
        if torch.is_grad_enabled():
            model.train_step(*batch, loss_weight=0.7 if other and name == "loss_weight" else 0.5)
        else:
            model(*batch)
    model.train()
    model.set_rng_state({"seed": 1, "step": 1})
    model.train_step(*batch)
    return str(error.value)


@pytest.mark.parametrize(
    ("recipe", "name", "said"),
    [
        ("ddp", "loss_weight", "0.7 on rank 3 and 0.5 on rank 0"),
        ("1f1b", "loss_weight", "0.7 on rank 3 and 0.5 on rank 0"),
        ("zero3", "model.training", "False on rank 3 and True on rank 0"),
        ("ddp", "torch.is_grad_enabled()", "False on rank 3 and True on rank 0"),
        ("tp_sp", "rng_state()['seed']", "7 on rank 3 and 5 on rank 0"),
        ("1f1b", "rng_state()['step']", "7 on rank 3 and 5 on rank 0"),
    ],
)
def test_a_step_that_ranks_take_in_unlike_states_is_refused(recipe: str, name: str, said: str) -> None:
    made = compiled(recipe)
    weights = dict(Model().double().state_dict())
    for text in living(4).run(_in_another_step, Compiled(made.bundle), weights, name):
        assert text.startswith(f"{name} is {said}")


def _own_turn() -> list[Tensor]:
    """One rank: forwards without a loss, one more of rank 0 alone."""
    torch.manual_seed(0)
    model = autopar.compile(
        nn.Linear(WIDTH, WIDTH),
        "cpu:1x2",
        (torch.zeros(BATCH, WIDTH),),
        recipe="ddp",
        mode="inference",
        time_limit_s=5.0,
    )
    x = model.shard_batch(torch.ones(BATCH, WIDTH))[0]
    with torch.no_grad():
        return [
            model(x[:rows])
            for rows in (4, 4 - torch.distributed.get_rank(), *((2,) if not torch.distributed.get_rank() else ()))
        ]


def test_a_rank_may_infer_by_itself() -> None:
    assert [len(outs) for outs in living(2).run(_own_turn)] == [3, 2]
