"""What `torchrun sharded.py` does: train the emitted model for some steps and print the loss; run its forward where it
was planned for inference.

    torchrun --nproc-per-node=4 sharded.py --weights full_state.pt --batch batch.pt --steps 10

Without `--batch` it draws one at the planned sizes: normal floats, and ids that are 0 or 1, which every vocabulary has.
"""

from __future__ import annotations

import argparse
import inspect
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar import torchrun
from autopar.errors import RunError
from autopar.runtime import constants
from autopar.runtime.module import ShardedModule
from autopar.runtime.process_group import join
from autopar.runtime.whole_step import step_of


def main(model_class: type[ShardedModule], arguments: Sequence[str] | None = None) -> float:
    """Run AdamW steps on one global batch and print the loss of each on rank 0; gives the last loss. Of a plan for
    inference: run forwards, which have none (nan).

    Raises RunError where the number of ranks, the weights or the batch do not fit the plan.
    """
    options = _parser().parse_args(arguments)
    mesh = model_class.MESH
    if mesh.ranks > 1 and not dist.is_initialized():
        if torchrun.ranks() is None:
            raise RunError(
                f"this program runs on {mesh.ranks} ranks; start it with torchrun --nproc-per-node={mesh.ranks}"
            )
        join(mesh.device_type)
    model = model_class(seed=options.seed)
    _fill(model, Path(inspect.getfile(model_class)))
    if options.weights:
        model.load_full(_saved(options.weights, "--weights"))
    else:
        initialise(model, options.seed)
    batch = model.shard_batch(**_batch(options.batch, model_class, options.seed))
    step, loss = step_of(model, batch, "adamw", options.lr), float("nan")
    for number in range(options.steps):
        start = time.perf_counter()
        if (found := step()) is not None:
            loss = float(found)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(
                f"step {number}: "
                f"{f'loss {loss:.6f}, ' if model_class.TRAINS else 'forward, '}{time.perf_counter() - start:.3f} s",
                flush=True,
            )
    return loss


def _fill(model: ShardedModule, emitted: Path) -> None:
    """Load the constants that were saved beside the emitted file."""
    path = emitted.parent / constants.NAME
    if not path.is_file():
        return
    found = constants.unpacked(torch.load(path, map_location="cpu", weights_only=True))
    if found is None:
        raise RunError(f"{path} holds no tensors by name: emit the plan again")
    tensors, plan = found
    if said := constants.disagree(path, plan, emitted.name, constants.plan_of(emitted.read_text(encoding="utf-8"))):
        raise RunError(said)
    model.load_constants(tensors)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train the sharded model for some steps on one batch; run its forward where it was planned for "
        "inference."
    )
    parser.add_argument(
        "--weights", help="file with the whole state dict (torch.save); without it: small random weights"
    )
    parser.add_argument(
        "--batch", help="file with the global batch: a dict of tensors by input name (torch.save); without it: random"
    )
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate, of training")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _saved(path: str, option: str) -> Any:
    """What torch.save wrote to the file of an `option`; nothing in it is executed. Raises RunError where it cannot be
    read."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        said = getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"{option} {path} cannot be read ({said}): give a whole file that torch.save wrote, with tensors by name"
        ) from error


def _batch(path: str | None, model_class: type[ShardedModule], seed: int) -> dict[str, Any]:
    if path is None:
        generator = torch.Generator().manual_seed(seed)
        return {
            name: _random(shape, getattr(torch, dtype), generator)
            for name, (shape, dtype) in model_class.SAMPLE.items()
        }
    found = _saved(path, "--batch")
    if not isinstance(found, dict):
        raise RunError(
            f"{path} holds a {type(found).__name__}, wanted a dict with the inputs {', '.join(model_class.INPUTS)}"
        )
    return found


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tuple(shape), generator=generator).to(dtype)
    return torch.randint(2, tuple(shape), generator=generator).to(dtype)


@torch.no_grad()
def initialise(model: ShardedModule, seed: int) -> None:
    """Small random weights for trying a plan out: normal(0, 0.02), ones for vectors called weight, zeros for the rest;
    the same on every mesh, because each whole tensor is drawn from its own seed. Constants that are loaded stay."""
    state = {}
    for number, (name, info) in enumerate(model.declared().items()):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        whole = torch.zeros(info.shape, dtype=info.torch_dtype)
        if whole.dim() > 1 and whole.is_floating_point():
            nn.init.normal_(whole, std=0.02, generator=generator)
        elif name.endswith("weight"):
            whole.fill_(1)
        state[name] = whole
    model.load_full({name: whole for name, whole in state.items() if name not in model.constant_names()})
