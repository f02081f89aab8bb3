"""Functions with backwards of their own, as people write them, and models that call one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Rounded(Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Reversed(Function):
    """The gradient turned round, by a number that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.by * grad, None


class Signed(Function):
    """A product of signs with gradients of the product: contractions with two operands that have gradients, and changes
    in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x.sign() @ w.sign()) * w.abs().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        grad = grad.mul_(w.abs().mean()) * 0.5
        return grad @ w.mT if ctx.needs_input_grad[0] else None, (x.mT @ grad).sum(0) if ctx.needs_input_grad[
            1
        ] else None


class Halves(Function):
    """The newer way to write one; a result without a gradient, and one that nobody may read."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x[..., ::2] > 0, x[..., 1::2].floor(), x[..., ::2] * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[0])
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, _: Tensor, odd: Tensor, even: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.stack((even, odd * x[..., 1::2].cos()), -1).flatten(-2)


class Turned(Function):
    """Complex numbers, turned in the forward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (1 + 1j)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Lean(Function):
    """The gradient that autograd has, too, with less saved: most such functions are of that kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.sigmoid(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return grad * result * (1 - result)


class Clipped(Function):
    """No linear map of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-0.1, 0.1)


class Added(Function):
    """A loss that comes in by the gradient alone, as some mixtures of experts have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 1


class InPlace(Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Thresholds(Function):
    """Leaves out small gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (grad.abs() > 1e-3)


class Pair(Function):
    """Two results, of which a backward may see one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return 3 * one if other is None and one is not None else one + other if one is not None else other  # type: ignore[operator]


class CountsBackwards(Function):
    """In a tensor that it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor) -> Tensor:
        ctx.count = count
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.count += 1
        return grad, None


class Failing(Function):
    """Runs on no numbers but its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch._check(x.device.type == "meta", lambda: "my kernel wants a device of its own")
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


Body = Callable[[Tensor, Tensor], Tensor]


class Asserts(Function):
    """Its forward is for `apply` alone, under which nothing is recorded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "call apply"
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


KEPT: dict[str, Body] = {
    "straight through": lambda h, w: Rounded.apply(h),
    "reversed": lambda h, w: Reversed.apply(h, 0.3) @ w,
    "signs": lambda h, w: Signed.apply(h, w),
    "asserting": lambda h, w: Asserts.apply(h @ w),
    "halves": lambda h, w: torch.cat([half * mask for mask, *halves in [Halves.apply(h @ w)] for half in halves], -1),
    "complex": lambda h, w: Turned.apply(torch.complex(h, h @ w)).real,
}
AS_AUTOGRAD: dict[str, Body] = {"lean": lambda h, w: Lean.apply(h @ w)}
REFUSED: dict[str, tuple[Body, str]] = {
    "clipped": (lambda h, w: Clipped.apply(h @ w), "not linear in the gradient"),
    "added": (lambda h, w: Added.apply(h @ w), "not linear in the gradient that comes in, or adds to it"),
    "small ones": (lambda h, w: Thresholds.apply(h @ w), "not linear in the gradient"),
    "one of two": (lambda h, w: Pair.apply(h @ w)[0], "not linear in the gradient"),
    "in place": (lambda h, w: InPlace.apply(h @ w), "not linear"),
    "failing": (lambda h, w: Failing.apply(h @ w), "my kernel wants a device of its own"),
}


class Calling(nn.Module):
    """Blocks that call a function between two maps."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(body) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


class Layer(nn.Module):
    """A map, the function with a weight of its own, a map."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up, self.down, self.w, self.body = (
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.Parameter(torch.randn(16, 16) / 4),
            body,
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.body(self.up(x), self.w))


def batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, 8, generator=generator), torch.randn(samples, 3, 8, generator=generator)
