"""When a backward can run: where gradients are on, something trains, and once. Ranks move gradients outside autograd, so that a backward can be run but not differentiated."""

from __future__ import annotations

import torch

from autopar.errors import RunError


def only_first_order(name: str) -> None:
    """Raise RunError in a backward that autograd records, with `create_graph=True`. `name` is whose gradient is about to move."""
    if torch.is_grad_enabled():
        raise RunError(f"a backward with create_graph=True: the gradient{f' of {name}' if name else ''} moves between ranks outside autograd, and second derivatives through it would be lost. Call "
                       "backward() without it. Second derivatives are in no plan: where the loss has a gradient in it (a gradient penalty), write that gradient as operators in the model's forward")


def check_gradients_on() -> None:
    """Raise RunError where a step of training begins without gradients."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RunError(f"train_step in a torch.{mode} region, where no backward can run: call it outside. To evaluate in one, call the model: model.eval(), then model(*batch)")


def check_trains(trains: bool) -> None:
    """Raise RunError where a step of training has no parameter that `trains`."""
    if not trains:
        raise RunError("train_step: no parameter has a gradient in this step, all that the loss depends on are frozen, and the step would change nothing. Call requires_grad_(True) of what is to train, "
                       "alike on all ranks; for the loss alone call the model in torch.no_grad(): model(*batch)")
