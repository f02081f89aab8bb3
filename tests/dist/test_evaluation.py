"""`model.eval()` on ranks gives what the user's own model gives in evaluation; where it cannot, it says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.verify import case_of, verify
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_stages, planned

WIDTH = 8


class Model(nn.Module):
    """Layers between maps. All that a step changes is in buffers: `seen` counts every call, `steps` those of
    training."""

    def __init__(
        self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)
    ) -> None:
        super().__init__()
        self.up, self.layer, self.down, self.call = nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH), call
        self.register_buffer("seen", torch.ones(()))
        self.register_buffer("steps", torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add_(1.0)
        out = self.down(self.call(self.layer, self.up(x))) * self.seen / self.steps
        if self.training:
            self.steps.add_(1.0)
        return (out - x).square().mean(), out


class Counted(nn.Module):
    """A block that counts its calls, those of evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return F.dropout(self.linear(x).tanh(), 0.5, self.training) * self.calls


class Deep(nn.Module):
    """Blocks that are left out at random, for each sample, in three spellings."""

    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.spelling, self.maps = spelling, nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def dropped(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.spelling == "transformers":
            return x.div(0.5) * (0.5 + torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device)).floor_()
        if self.spelling == "timm":
            return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5).div_(0.5)
        x *= torch.empty_like(x).uniform_(0.5, 1.5)
        return x

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.maps:
            x = x + self.dropped(layer(x).tanh())
        return x


def _normed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(1, 2)).transpose(1, 2)


def _attended(layer: nn.Module, x: Tensor) -> Tensor:
    q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if layer.training else 0.0).transpose(1, 2).flatten(2)


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True), 5, enable_nested_tensor=False
    )


def _block() -> nn.Module:
    return nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU())


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: Model(
        nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.Dropout1d(0.5), nn.AlphaDropout(0.5))
    ),
    "random slopes": lambda: Model(nn.RReLU()),
    "batch norm": lambda: Model(nn.Sequential(_block(), nn.Dropout(0.5), _block()), _normed),
    "batch norm called twice": lambda: Model(_block(), lambda layer, x: _normed(layer, _normed(layer, x))),
    "blocks with batch norm": lambda: Model(nn.Sequential(*(_block() for _ in range(5))), _normed),
    "attention": lambda: Model(nn.Linear(WIDTH, 3 * WIDTH), _attended),
    "blocks": lambda: Model(_encoder()),
    "blocks that count": lambda: Model(nn.Sequential(*(Counted() for _ in range(5)))),
    **{
        f"left out as {spelling}": lambda spelling=spelling: Model(Deep(spelling))
        for spelling in ("transformers", "timm", "jitter")
    },
    "lstm": lambda: Model(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.5, batch_first=True), lambda layer, x: layer(x)[0]),
}


def data() -> Tensor:
    return torch.randn(8, 6, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@cache
def subject(name: str) -> tuple[Subject, nn.Module]:
    torch.manual_seed(0)
    model = LAYERS[name]()
    for name_of, buffer in model.named_buffers():
        if buffer.is_floating_point():
            torch.nn.init.uniform_(buffer, 0.5, 1.5)
            buffer -= float(name_of.endswith("running_mean"))  # around zero: nothing would pass the ReLU behind a norm
    return Subject(
        name, "train", capture(model, (data().float(),)), {n: t.clone() for n, t in model.state_dict().items()}
    ), model


def _plan(who: Subject, how: str) -> Plan:
    if how not in ("1f1b", "gpipe", "naive", "zbv_zero_bubble"):
        return planned(who, (2,), how)
    return by_stages(who, (1,), "single", 2, 1 if how == "naive" else 2, how, 2 if how.startswith("zbv") else 1)


def _life(source: str, rank_case: RankCase) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """One rank: outputs in evaluation, of a step of training, and in evaluation again; the buffers behind each."""
    module = rank_case.build(source)
    batch, outputs, buffers = module.shard_batch(data()), [], []
    for training in (False, True, False):
        with torch.no_grad():
            outputs.append(list(module.full(module.train(training)(*batch)).values())[-1])
        buffers.append({name: tensor.clone() for name, tensor in module.full_state_dict().items()})
    return outputs, buffers


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("dropout", "zero3"),
        ("random slopes", "random 0"),
        ("batch norm", "random 1"),
        ("batch norm", "ddp"),
        ("batch norm called twice", "zero3"),
        ("blocks with batch norm", "naive"),
        ("attention", "tp"),
        ("blocks", "1f1b"),
        ("blocks that count", "random 0"),
        ("left out as transformers", "1f1b"),
        ("left out as timm", "random 1"),
        ("left out as jitter", "zero3"),
        ("lstm", "zero3"),
        *(
            pytest.param(name, how, marks=pytest.mark.slow)
            for name in LAYERS
            for how in ("tp", "zero3", "random 2", "random 3", "naive", "1f1b", "zbv_zero_bubble")
            if "norm" not in name or how not in ("1f1b", "zbv_zero_bubble")
        ),
    ],
)
def test_evaluation_is_that_of_the_model(name: str, how: str) -> None:
    who, model = subject(name)
    case = case_of(who.captured, _plan(who, how), who.weights, {"x": data()})
    assert verify(case, ranks=living(2)).ok
    model.double().load_state_dict(dict(who.weights))
    wanted = model.eval()(data())[1].detach()
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    for outputs, buffers in living(2).run(_life, case.source(), case.rank_case):
        evaluated, trained, again = outputs
        torch.testing.assert_close(evaluated, wanted, rtol=1e-9, atol=1e-12)
        assert not torch.allclose(trained, wanted, rtol=1e-3)
        after, stepped, last = buffers
        assert all(torch.equal(after[n].double(), kept[n].double()) for n in after), {
            n: (after[n], kept[n]) for n in after
        }
        changed = [n for n, _ in model.named_buffers() if n in stepped and not torch.equal(stepped[n], after[n])]
        assert set(changed) == {n for n, _ in model.named_buffers() if n in stepped}, (
            "batch norms and both counters go on in training"
        )
        assert {n for n in last if not torch.equal(last[n], stepped[n])} <= {
            n for n in last if n.endswith(("seen", "calls"))
        }
        if len(stepped) == len(kept):  # all stages are here
            model.load_state_dict({n: t.double() for n, t in stepped.items()})
            torch.testing.assert_close(again, model.eval()(data())[1].detach(), rtol=1e-6, atol=1e-9)


def _evaluated_first(
    source: str, rank_case: RankCase, mode: Callable[[], AbstractContextManager[None]]
) -> dict[str, Tensor]:
    """One rank: what a module that was built in a mode without gradients, took statistics there and evaluated there
    when a weight had been frozen, comes to in training."""
    with mode():
        module = rank_case.build(source)
    batch = module.shard_batch(data())
    with mode():
        module(*batch)
    for frozen in (True, False):
        next(module.parameters()).requires_grad_(not frozen)
        with mode():
            module.eval()(*batch)
        optimizer = torch.optim.AdamW(module.train().parameters(), lr=0.1)
        module.train_step(*batch)
        optimizer.step()
        optimizer.zero_grad()
    return module.full_state_dict()


@pytest.mark.parametrize("how", ["ddp", "zero1", "zero3", "naive"])
def test_what_inference_mode_leaves_can_train(how: str) -> None:
    who, _ = subject("batch norm")
    case = case_of(who.captured, _plan(who, how), who.weights, {"x": data()})
    ran = [
        living(2).run(_evaluated_first, case.source(), case.rank_case, mode)
        for mode in (torch.inference_mode, torch.no_grad)
    ]
    for found, wanted in zip(*ran, strict=True):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], value) for name, value in wanted.items())


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.training:
            hidden = hidden * hidden.abs()
        return hidden.square().mean()


class Switching(nn.Module):
    """Two numbers that only their values tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steep, self.flat = nn.Linear(WIDTH, WIDTH), torch.tensor(2.0), torch.tensor(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * (self.steep if self.training else self.flat)).square().mean()


class AlwaysDropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5).square().mean()


def _refused(source: str, rank_case: RankCase) -> str:
    module = rank_case.build(source)
    module.train_step(*module.shard_batch(data()))
    try:
        module.eval()
    except RunError as error:
        assert module.training
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Noisy, "square computes something that training does not (test_evaluation.py:"),
        (Switching, "mul computes something that training does not (test_evaluation.py:"),
        (AlwaysDropping, "dropout does what it does in training when the model evaluates, too (test_evaluation.py:"),
    ],
)
def test_what_no_flag_turns_off_is_refused(kind: type[nn.Module], why: str) -> None:
    model = kind()
    who = Subject("refused", "train", capture(model, (data().float(),)), model.state_dict())
    case = case_of(who.captured, planned(who, (2,), "zero3"), who.weights, {"x": data()})
    for said in living(2).run(_refused, case.source(), case.rank_case):
        assert why in said and 'mode="inference"' in said


class Drawing(nn.Module):
    """Draws in either mode, as autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spread = self.spread(x).exp()
        return (self.mean(x) + spread * torch.randn_like(spread)).square().mean()


def test_what_is_drawn_in_either_mode_is_drawn_in_evaluation() -> None:
    found = capture(Drawing(), (data().float(),)).evaluation
    assert (found.why, found.noises, found.differs) == ("", 0, False)


def test_a_module_for_inference_evaluates_either_way() -> None:
    torch.manual_seed(0)
    model = LAYERS["batch norm"]().eval()
    captured = capture(model, (data().float(),), mode="inference")
    who = Subject("inference", "inference", captured, model.state_dict())
    case = case_of(captured, planned(who, (2,), "random 0"), who.weights, {"x": data()})
    wanted = model.double()(data())[1].detach()
    for outputs, _ in living(2).run(_life, case.source(), case.rank_case):
        for number, output in enumerate(outputs):
            torch.testing.assert_close(output, wanted * (number + 2) / 2, rtol=1e-9, atol=1e-12)


def _of_a_part(source: str, rank_case: RankCase) -> tuple[list[str], list[bool]]:
    """One rank: what is said where a part is to have another mode than the model, and the modes of its modules."""
    module, said, modes = rank_case.build(source), [], []
    for training in (True, False):
        module.train(training)
        for part in (module.layer, module.up):
            assert part.train(training) is part
            with pytest.raises(RunError) as error:
                part.train(not training) if not training else part.eval()
            said.append(str(error.value))
        modes += [each.training is training for each in module.modules()]
    return said, modes


def test_a_part_alone_has_no_mode() -> None:
    who, _ = subject("batch norm")
    case = case_of(who.captured, planned(who, (2,), "ddp"), who.weights, {"x": data()})
    for said, modes in living(2).run(_of_a_part, case.source(), case.rank_case):
        assert all(modes) and len(modes) > 4
        assert [text.split("()")[0] for text in said] == ["eval", "eval", "train", "train"] and all(
            "of a part of a sharded model would change nothing" in text for text in said
        )
