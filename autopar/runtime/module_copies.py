"""A built module again: same weights, buffers and random numbers to come, memory of its own."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from autopar._torch import as_parameter, local_of, wrap_like


def twin(module: Any, memo: dict[int, Any]) -> Any:
    """A copy of a ShardedModule on the same mesh; `memo` is that of `copy.deepcopy`. Gradients are not copied."""
    memo[id(module)] = made = type(module)(seed=module.rng.seed)
    fresh: dict[int, Tensor] = {}
    for name, held in made._held.items():
        mine = module._held[name].tensor
        tensor = wrap_like(local_of(mine).detach().clone(), mine)
        fresh[id(held.tensor)] = as_parameter(tensor, mine.requires_grad) if isinstance(mine, nn.Parameter) else tensor
    for part in made.modules():  # tied ones have several names
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            table.update({key: fresh[id(tensor)] for key, tensor in table.items() if id(tensor) in fresh})
    made.rng, made._constant = module.rng.copy(), dict(module._constant)
    for name, value in vars(module).items():  # what users have put there
        if name not in vars(made) and not name.startswith("_"):
            setattr(made, name, copy.deepcopy(value, memo))
    return made.train(module.training)
