"""Buffers keep their dtypes in mixed precision, with all that is computed of them alone or changes them; activations
have the dtype of the computation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from autopar.capture import Captured, lift
from autopar.capture.precision import capture_in
from autopar.frontend.loading import in_dtype
from passes.interpret import Interpret

WIDTH, LONG = 8, 600


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.build()

    def forward(self, x):
        h = self.use(self.linear(x))
        return h.float().square().mean(), h


class Angles(Small):
    def build(self):
        self.register_buffer("inverse", 1 / (10000 ** (torch.arange(0, WIDTH, 2).float() / WIDTH)), persistent=False)

    def angles(self, h):
        positions = torch.arange(h.shape[1], device=h.device).float()
        angles = positions[:, None] * self.inverse
        return torch.cat([angles, angles], -1)

    def use(self, h):
        angles = self.angles(h)
        return h * angles.cos() + h.flip(-1) * angles.sin().to(h.dtype)


class PositionsOfItsDtype(Angles):
    def angles(self, h):
        positions = torch.arange(h.shape[1], device=h.device, dtype=self.inverse.dtype)
        angles = torch.einsum("i,j->ij", positions, self.inverse)
        return torch.cat([angles, angles], -1)


class PositionsOfItsType(Angles):
    def angles(self, h):
        angles = torch.outer(torch.arange(h.shape[1], device=h.device).type_as(self.inverse), self.inverse)
        return torch.cat([angles, angles], -1)


class Tables(Small):
    def build(self):
        self.register_buffer("places", torch.randn(LONG, WIDTH))
        self.register_buffer("scale", torch.tensor(0.3))
        self.register_buffer("weight", torch.randn(WIDTH, WIDTH))

    def use(self, h):
        return F.linear(h + self.places[: h.shape[1]], self.weight) * self.scale


class Complex(Small):
    def build(self):
        self.register_buffer(
            "turns", torch.polar(torch.ones(LONG, WIDTH // 2), torch.rand(LONG, WIDTH // 2)), persistent=False
        )

    def use(self, h):
        turned = torch.view_as_complex(h.float().unflatten(-1, (-1, 2))) * self.turns[: h.shape[1]]
        return torch.view_as_real(turned).flatten(-2).type_as(h)


class Average(Small):
    def build(self):
        self.register_buffer("average", torch.zeros(WIDTH))

    def use(self, h):
        h = h - self.average
        with torch.no_grad():
            self.average.lerp_(h.mean((0, 1)), 0.01)
        return h


class Assigned(Average):
    def use(self, h):
        self.average = self.average * 0.9 + (h.detach().mean((0, 1)) * 0.1).to(self.average.dtype)
        return h - self.average


class Norm(Average):
    def build(self):
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.001)

    def use(self, h):
        return self.norm(h.flatten(0, 1)).view_as(h)


class Codes(Small):
    def build(self):
        self.register_buffer("codes", torch.randn(16, WIDTH))
        self.register_buffer("counts", torch.ones(16))
        self.register_buffer("sums", self.codes.clone())

    def use(self, h):
        rows = h.detach().flatten(0, 1)
        chosen = torch.cdist(rows.float(), self.codes.float()).argmin(-1)
        of = F.one_hot(chosen, 16).to(h.dtype)
        code = F.embedding(chosen, self.codes).view_as(h)
        with torch.no_grad():
            self.counts.mul_(0.9).add_(of.sum(0), alpha=0.1)
            self.sums.mul_(0.9).add_(of.t() @ rows, alpha=0.1)
            self.codes.copy_(self.sums / self.counts[:, None])
        return h + (code - h).detach()


class Queue(Small):
    def build(self):
        self.register_buffer("queue", torch.randn(WIDTH, 32))

    def use(self, h):
        scores = h @ self.queue
        self.queue[:, :4] = h.detach().flatten(0, 1)[:4].t()
        return scores


class State(Small):
    def build(self):
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))

    def use(self, h):
        gate = torch.sigmoid(self.gate(self.state))
        new = self.state * gate + (1 - gate) * h.mean((0, 1))
        self.state.copy_(new.detach())
        return h + new


class Spectral(Small):
    def build(self):
        nn.utils.parametrizations.spectral_norm(self.linear)

    def use(self, h):
        return h


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, h, table):
        h = self.norm((self.linear(h) * table).transpose(1, 2)).transpose(1, 2)
        self.average.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        return h - self.average


class Deep(PositionsOfItsDtype):
    def build(self):
        super().build()
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def use(self, h):
        table = self.angles(h).cos()
        for block in self.blocks:
            h = block(h, table)
        return h


MODELS = [
    Angles,
    PositionsOfItsDtype,
    PositionsOfItsType,
    Tables,
    Complex,
    Average,
    Assigned,
    Norm,
    Codes,
    Queue,
    State,
    Spectral,
    Deep,
]


def mixed(model: nn.Module, x: torch.Tensor, precision: str = "bf16") -> Captured:
    return capture_in(model, (x,), {}, precision=precision, mode="train")[0]


def state(model: nn.Module, captured: Captured) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in {**model.state_dict(), **captured.constants}.items()}


def once(
    model: nn.Module, captured: Captured, x: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output and the new buffers of one step with parameters and inputs in `dtype`, and buffers as they are."""
    trained = dict(model.named_parameters())
    held = {name: value.to(dtype) if name in trained else value for name, value in state(model, captured).items()}
    ran = Interpret(captured.gm, held)
    return ran.run_named({captured.input_names[0]: x.to(dtype)})[1], ran.changed


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_buffers_rest_and_change_in_their_own_dtypes(kind: type[Small], precision: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 40, WIDTH)
    own = {name: buffer.dtype for name, buffer in model.named_buffers()}
    captured = mixed(model, x, precision)
    got, changed = once(model, captured, x, dtype)
    assert got.dtype == dtype
    assert {name: value.dtype for name, value in changed.items()} == {name: own[name] for name in changed}
    assert {name: value.dtype for name, value in captured.constants.items()} == {
        name: own[name] for name in captured.constants
    }
    if kind is not Codes:  # rows near two codes take the other one
        real = copy.deepcopy(model)
        torch.testing.assert_close(got.float(), real(x)[1], rtol=0.05, atol=0.1)
        for name, value in real.named_buffers():
            torch.testing.assert_close(
                changed.get(name, value), value, rtol=1e-2, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("kind", MODELS)
def test_in_float64_nothing_is_rounded(kind: type[Small]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(4, 40, WIDTH)
    captured = mixed(model, x)
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    ran = Interpret(
        lift(captured.gm),
        {name: value.to(wide.get(value.dtype, value.dtype)) for name, value in state(model, captured).items()},
    )
    got = ran.run_named({captured.input_names[0]: x.double()})[1]
    real = in_dtype(copy.deepcopy(model), torch.float64)
    # what the model itself casts to float32 is not lifted there
    torch.testing.assert_close(got, real(x.double())[1], rtol=1e-6, atol=1e-6)
    for name, value in real.named_buffers():
        torch.testing.assert_close(ran.changed.get(name, value), value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [Angles, PositionsOfItsDtype, PositionsOfItsType])
def test_angles_are_rounded_once(kind: type[Angles]) -> None:
    """The table is that of float32, cast where it meets activations: 257 is no number of bfloat16, nor is 599."""
    model = kind()
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.copy_(torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]))
    x = torch.zeros(1, LONG, WIDTH)
    angles = model.angles(x)
    got, _ = once(model, mixed(model, x), x, torch.bfloat16)
    assert torch.equal(got[0, :, 0], angles[:, 0].cos().bfloat16())
    assert torch.equal(got[0, :, -1], angles[:, -1].sin().bfloat16())


class Rotary(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.linear, self.rotary = nn.Linear(16, 16), LlamaRotaryEmbedding(config)

    def forward(self, x):
        h = self.linear(x)
        cos, sin = self.rotary(h, torch.arange(x.shape[1], device=x.device)[None])
        return h.float().square().mean(), cos * h, sin * h


def test_tables_of_hugging_face_are_those_of_float32() -> None:
    model = Rotary(LlamaConfig(hidden_size=16, num_attention_heads=1, rope_theta=500000.0))
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.fill_(1.0)
    x = torch.zeros(1, 2048, 16)
    captured = mixed(model, x)
    assert torch.equal(captured.constants["rotary.inv_freq"], model.rotary.inv_freq)
    held = {
        name: value.bfloat16() if name.startswith("linear") else value for name, value in state(model, captured).items()
    }
    outputs = Interpret(captured.gm, held).run_named({captured.input_names[0]: x.bfloat16()})
    for got, real in zip(outputs[1:], model.rotary(x.bfloat16(), torch.arange(2048)[None]), strict=False):
        assert got.dtype == torch.bfloat16 and torch.equal(got, real)


def test_a_dtype_is_that_of_buffers_too() -> None:
    model, x = Average(), torch.randn(4, 40, WIDTH)
    captured, stated = capture_in(model, (x,), {}, precision="bfloat16", mode="train")
    (buffer,) = [node for node in captured.gm.graph.nodes if node.meta.get("role") == "buffer"]
    assert stated == "bfloat16" and buffer.meta["val"].dtype == torch.bfloat16
    assert capture_in(model, (x,), {}, precision="bf16", mode="inference")[1] == "bfloat16"
