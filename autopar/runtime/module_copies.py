"""Copies of a built module (copy.deepcopy): same weights, buffers and random state in memory of its own, on the same
ranks. Pickling is refused."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from autopar._torch import as_parameter, local_of, wrap_like
from autopar.errors import RunError


def twin(module: Any, memo: dict[int, Any]) -> Any:
    """A copy of a ShardedModule on the same mesh; `memo` is that of `copy.deepcopy`. Gradients are not copied."""
    module._check_written()
    memo[id(module)] = made = type(module)(seed=module.rng.seed)
    fresh = {id(held.tensor): _copied(module._held[name].tensor, memo) for name, held in made._held.items()}
    for part in made.modules():  # tied ones have several names
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            table.update({key: fresh[id(tensor)] for key, tensor in table.items() if id(tensor) in fresh})
    made.rng, made._constant = module.rng.copy(), dict(module._constant)
    for name, value in vars(module).items():  # what users have put there
        if name not in vars(made) and not name.startswith("_"):
            setattr(made, name, copy.deepcopy(value, memo))
    return made.train(module.training)


def _copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """The copy of a parameter or buffer, one for all that is copied together: an optimizer steps the parameters of the
    module that is copied with it, whichever comes first."""
    if id(tensor) not in memo:
        made = wrap_like(local_of(tensor).detach().clone(), tensor)
        memo[id(tensor)] = as_parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    found: Tensor = memo[id(tensor)]
    found.grad = None  # that of a DTensor is copied by torch
    return found


def not_pickled(module: Any, protocol: Any) -> Any:
    """`__reduce_ex__` of sharded modules: raises RunError."""
    raise RunError(
        "a sharded module cannot be pickled (torch.save(module), copy.copy, processes that are spawned with it): its "
        "class is emitted, and its parameters are parts on the ranks of this run. Save its values, model.state_dict() "
        "by torch.distributed.checkpoint or model.full_state_dict() by torch.save, and the plan by "
        "compiled.save(folder); autopar.load(folder) makes it again. copy.deepcopy(module) copies it on these ranks"
    )
