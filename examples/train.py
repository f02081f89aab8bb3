"""A training script under torchrun: own data, learning rate schedule, accumulation, evaluation, checkpoints, resuming.

    torchrun --nproc-per-node=4 -m examples.train --steps 20
    torchrun --nproc-per-node=2 -m examples.train --steps 40 --resume --recipe zero3      # another mesh, another plan

What autopar asks of a script of one device is marked (1) to (6). Everything else is as it was: the model, the data, the
optimizer with its groups, the schedule of the learning rate.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import autopar
from models import gpt

CONFIG = gpt.Config(vocab=97, positions=64, layers=4, heads=4, hidden=64, dropout=0.1)
SEQ, BATCH, ACCUMULATED = 64, 8, 2  # tokens of a sample; samples of a forward, over all ranks; forwards of a step
DATA = torch.arange(20_000) ** 2 % CONFIG.vocab


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    """The ids and the next ids of one forward, [BATCH, SEQ] each: they follow from the step alone, so that a run that
    goes on has the data of one that was never interrupted."""
    draw = torch.Generator().manual_seed(1_000 * step + part)
    at = torch.randint(len(DATA) - SEQ, (BATCH, 1), generator=draw) + torch.arange(SEQ)
    return DATA[at], DATA[at + 1]


def learning_rate(step: int) -> float:
    """Five steps of warm-up, then a cosine over 100 steps."""
    return 3e-3 * min((step + 1) / 5, 0.55 + 0.45 * math.cos(math.pi * min(step, 100) / 100))


@torch.no_grad()
def evaluate(model: autopar.Compiled, batches: int = 4) -> float:
    """The mean loss of batches that training does not see; dropout is off."""
    model.eval()
    losses = [model.full(model(*model.shard_batch(*batch(-1 - number, 0))))[0].item() for number in range(batches)]
    model.train()
    return sum(losses) / batches


def state_of(model: autopar.Compiled, optimizer: torch.optim.Optimizer, step: int) -> dict[str, object]:
    """What a checkpoint holds: names and shapes are those of the model on one device, whatever the plan."""
    return {
        "model": model.state_dict(),
        "optimizer": model.optimizer_state_dict(optimizer),
        "rng": model.rng_state(),
        "step": step,
    }


def main() -> None:
    """Train for so many steps in all, and leave a checkpoint."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--steps", type=int, default=20)
    asked.add_argument("--recipe", help="a strategy by name; else the search finds one")
    asked.add_argument("--folder", type=Path, default=Path("checkpoint"))
    asked.add_argument("--resume", action="store_true")
    options = asked.parse_args()

    dist.init_process_group("gloo")  # (1) "nccl", and torch.cuda.set_device, on GPUs
    torch.manual_seed(0)
    model = autopar.compile(  # (2) in place of .to(device), DistributedDataParallel, FSDP
        gpt.GPT(CONFIG), f"cpu:1x{dist.get_world_size()}", batch(0, 0), recipe=options.recipe
    )
    matrices = [p for p in model.parameters() if p.dim() >= 2]  # (3) the optimizer has the compiled model's parameters
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    first = 0
    if options.resume:  # (4) state dicts by its methods
        state = state_of(model, optimizer, 0)
        dcp.load(state, checkpoint_id=options.folder)
        model.load_state_dict(state["model"])
        model.load_optimizer_state_dict(optimizer, state["optimizer"])
        model.set_rng_state(state["rng"])
        first = state["step"]

    for step in range(first, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = 0.0
        for part in range(ACCUMULATED):  # (5) forward and backward, of this rank's part of a batch that all ranks have
            parts = model.shard_batch(*batch(step, part))
            loss += model.train_step(*parts, loss_weight=1 / ACCUMULATED).item() / ACCUMULATED
        norm = model.clip_grad_norm_(1.0)  # (6) over all ranks and stages
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}, norm of gradients {norm.item():.4f}", flush=True)

    dcp.save(state_of(model, optimizer, options.steps), checkpoint_id=options.folder)
    seen = evaluate(model)
    if dist.get_rank() == 0:
        print(f"{model}: loss of other data {seen:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
