"""One training step of the emitted module against hand-written DDP, FSDP2 and tensor parallelism of the same model.

    python -m benchmarks.step [--hidden 512] [--layers 4] [--batch 8] [--seq 128] [--steps 10] [--rounds 3]

Two gloo ranks on this machine, one thread each, everything in one run: hand-written and emitted take turns, and the
ratio of their medians counts (the machine's speed drifts, ratios do not). The model is `Net`, a stack of MLP blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.runtime import launch

RANKS = 2


class Net(nn.Module):
    """A stack of MLP blocks with residuals and a mean squared error: what all three libraries parallelise by hand in a
    few lines."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(hidden) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


class Mlp(nn.Module):
    """Norm, up, GELU, down, residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net)


def _fsdp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _tp(net: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    plan = {"up": ColwiseParallel(input_layouts=Replicate()), "down": RowwiseParallel(output_layouts=Replicate())}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return net


HAND: dict[str, Callable[[Net], nn.Module]] = {"ddp": _ddp, "zero3": _fsdp, "tp": _tp}


def _step(model: Any, optimizer: torch.optim.Optimizer, run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    optimizer.step()
    optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - start


def _rank(recipe: str, hidden: int, layers: int, batch: int, seq: int, steps: int, rounds: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, twin = Net(hidden, layers), Net(hidden, layers)
    x, y = torch.randn(batch, seq, hidden), torch.randn(batch, seq, hidden)
    hand = HAND[recipe](net)
    part = (x, y) if recipe == "tp" else tuple(t.chunk(RANKS)[dist.get_rank()] for t in (x, y))
    compiled = autopar.compile(twin, f"cpu:1x{RANKS}", (x, y), recipe=recipe)
    local = compiled.shard_batch(x, y)
    by_hand = torch.optim.AdamW(hand.parameters())
    ours = torch.optim.AdamW(compiled.parameters())
    times: dict[str, list[float]] = {"hand": [], "ours": []}
    for round_ in range(rounds + 1):
        for _ in range(steps):
            first = _step(hand, by_hand, lambda: hand(*part).backward())
            second = _step(compiled, ours, lambda: compiled.train_step(*local))
            if round_:  # the first round warms up
                times["hand"].append(first)
                times["ours"].append(second)
    return statistics.median(times["hand"]), statistics.median(times["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 512), ("layers", 4), ("batch", 8), ("seq", 128), ("steps", 10), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = vars(parser.parse_args())
    rows = []
    for recipe in HAND:
        hand, ours = launch(
            _rank, RANKS, recipe, *(options[k] for k in ("hidden", "layers", "batch", "seq", "steps", "rounds"))
        )[0]
        rows.append([recipe, hand * 1e3, ours * 1e3, ours / hand])
    print(tabulate(rows, headers=["recipe", "by hand ms", "emitted ms", "ratio"], floatfmt=".3f"))


if __name__ == "__main__":
    main()
