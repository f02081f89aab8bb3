"""Running statistics of batch norms made anew, as averaged weights need them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.swa_utils import AveragedModel, update_bn

import autopar
from autopar.errors import RunError
from tests.helpers.ranks import on_ranks

WIDTH, ROWS = 8, 8


class Model(nn.Module):
    """Blocks with batch norms, one of another momentum, one that evaluates, and one that is called twice where
    `twice`."""

    def __init__(self, *, twice: bool = False, momentum: float = 0.3) -> None:
        super().__init__()
        self.twice = twice
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(4))
        )
        self.last, self.frozen = nn.BatchNorm1d(WIDTH, momentum=momentum, affine=False), nn.BatchNorm1d(WIDTH).eval()

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(self.blocks(x))
        return (self.frozen(self.last(h * h) if self.twice else h) - x).square().mean()


def _made(
    recipe: str, *, mode: str = "train", **options: float
) -> tuple[autopar.compiled.Compiled, nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model, batches = Model(**options).double(), [torch.randn(ROWS, WIDTH).double() * (i + 1) + i for i in range(3)]  # type: ignore[arg-type]
    return autopar.compile(model, "cpu:1x2", (batches[0],), recipe=recipe, mode=mode, time_limit_s=5.0), model, batches


def _averaged(recipe: str) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    """One rank: the buffers of an average of weights on one device, and those that are here of the same on ranks, which
    was evaluating."""
    made, model, batches = _made(recipe)
    averages = AveragedModel(model), AveragedModel(made.module)
    for module, average in zip((model, made.module), averages, strict=True):
        optimizer = optim.SGD(module.parameters(), 0.1)
        for x in batches:
            (made.train_step(*made.shard_batch(x)) if module is made.module else model(x).backward())
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(module)
    alone, ours = (average.module for average in averages)
    update_bn(batches, alone)
    ours.eval().update_bn(made.shard_batch(x) for x in batches)
    return dict(alone.named_buffers()), ours.full_state_dict(), ours.training


@pytest.mark.parametrize("recipe", ["ddp", "tp", "naive_mp"])
def test_statistics_of_averaged_weights_are_those_of_one_device(recipe: str) -> None:
    found: dict[str, Tensor] = {}
    for wanted, got, training in on_ranks(2, _averaged, recipe):
        assert not training
        found |= {name: value for name, value in got.items() if name in wanted}
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        kept = {
            "frozen.running_mean": torch.zeros(WIDTH),
            "frozen.running_var": torch.ones(WIDTH),
            "frozen.num_batches_tracked": torch.zeros(()),
        }.get(name)
        torch.testing.assert_close(
            value,
            wanted[name] if kept is None else kept.to(value.dtype),
            rtol=1e-12,
            atol=1e-12,
            msg=lambda text, n=name: f"{n}: {text}",
        )


def _refused(recipe: str, options: dict[str, float], mode: str, number: int) -> tuple[str, bool]:
    """One rank: what is said, and whether the buffers are as before."""
    made, _, batches = _made(recipe, mode=mode, **options)
    before = made.full_state_dict()

    def some() -> Iterator[Tensor]:
        yield from (made.shard_batch(x)[0] for x in batches[:number])

    try:
        made.update_bn(some())
    except RunError as error:
        after = made.full_state_dict()
        return str(error), all(torch.equal(after[name], value) for name, value in before.items())
    return "", False


@pytest.mark.parametrize(
    ("recipe", "options", "mode", "number", "why"),
    [
        ("ddp", {"twice": True}, "train", 3, "last takes the statistics of 2 inputs in one forward"),
        ("naive_mp", {"twice": True}, "train", 3, "last takes the statistics of 2 inputs in one forward"),
        ("ddp", {"momentum": 0.0}, "train", 3, "last has momentum 0"),
        ("ddp", {}, "train", 0, "got no batches"),
        ("ddp", {}, "inference", 3, "planned for inference"),
    ],
)
def test_what_gives_no_statistics_is_refused(
    recipe: str, options: dict[str, float], mode: str, number: int, why: str
) -> None:
    for said, same in on_ranks(2, _refused, recipe, options, mode, number):
        assert why in said and same
