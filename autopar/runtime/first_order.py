"""Checks of what a training step supports: gradients must be recorded, some parameter must train, and there are no
second derivatives, since ranks move gradients outside autograd."""

from __future__ import annotations

import torch

from autopar.errors import RunError


def only_first_order(name: str) -> None:
    """Raise RunError in a backward that autograd records (`create_graph=True`). `name` is the parameter or value whose
    gradient is about to be moved; may be empty."""
    if torch.is_grad_enabled():
        raise RunError(
            f"a backward with create_graph=True: the gradient{f' of {name}' if name else ''} moves between ranks "
            "outside autograd, and second derivatives through it would be lost. Call backward() without it. Second "
            "derivatives are in no plan: where the loss has a gradient in it (a gradient penalty), write that "
            "gradient as operators in the model's forward"
        )


def check_gradients_on() -> None:
    """Raise RunError where gradients are not recorded (no_grad, inference_mode): no training step can run."""
    if not torch.is_grad_enabled():
        mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise RunError(
            f"train_step in a torch.{mode} region, where no backward can run: call it outside. To evaluate in one, "
            "call the model: model.eval(), then model(*batch)"
        )


def check_trains(trains: bool) -> None:
    """Raise RunError unless some parameter `trains`: a training step would change nothing."""
    if not trains:
        raise RunError(
            "train_step: no parameter has a gradient in this step, all that the loss depends on are frozen, and the "
            "step would change nothing. Call requires_grad_(True) of what is to train, alike on all ranks; for the "
            "loss alone call the model in torch.no_grad(): model(*batch)"
        )
