"""What the optimizer's step and the sums of microbatches' gradients read and write, by hand."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.cost.memory import parameter_bytes
from autopar.optimizers import OPTIMIZERS
from autopar.problem.graph import Op
from autopar.problem.options import sections_of, table_of
from autopar.problem.prices import Prices
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.rules.language import Option
from tests.helpers.moved import Moved

WIDE = 512
NUMBERS = WIDE * WIDE
HOST = Cluster.parse("h100:1x2")
ROW = re.compile(r"\| `\"([\w-]+)\"` \|.*\| (\d+) \| (\d+) \|\n")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@cache
def weight(precision: str, factor: str) -> tuple[Op, Option]:
    """The weight of a layer that is computed in this precision, under an option on two ranks."""
    with torch.device("meta"):
        model = nn.Linear(WIDE, WIDE, bias=False).to(DTYPES[precision])
        x = torch.empty(4, WIDE, dtype=DTYPES[precision])

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).sum()

    program = read(capture(Summed(), (x,)).gm, {"b": 4}, training=True, device="cuda")
    (found,) = [op for op in program.ops.values() if op.role == "param"]
    options = table_of(program, 2, sections_of(program, None), None)[found.name]
    return found, next(option for option in options if option.factor == factor)


def prices(precision: str, optimizer: str, offload: str = "") -> Prices:
    settings = Settings(precision=precision, optimizer=optimizer, offload=offload)
    return Prices(HOST.mesh((2,)), HOST.device, settings)


def passes_s(nbytes: float) -> float:
    device = HOST.device
    return nbytes / (device.memory_bandwidth_bytes_s * device.achievable_bandwidth * device.update)


@pytest.mark.parametrize("factor", ["", "d0"])
@pytest.mark.parametrize(
    ("precision", "optimizer", "each"),
    [
        ("float32", "sgd", 4 * 3),
        # and the momentum twice more, once written
        ("float32", "sgd-momentum", 4 * 8),
        ("float32", "adamw", 4 * 7),
        # and the cast to what is computed with
        ("bf16", "adamw", 4 * 7 + 4 + 2),
        # gradients are divided by the scale of the loss before
        ("fp16", "adamw", 4 * 9 + 4 + 2),
    ],
)
def test_a_step_reads_all_and_writes_all_but_the_gradient(
    precision: str, optimizer: str, each: int, factor: str
) -> None:
    found, option = weight(precision, factor)
    own = NUMBERS / (2 if factor else 1)
    wanted_s = passes_s(each * own) + HOST.device.update_s
    assert prices(precision, optimizer).update_s(found, (option,)) == pytest.approx(wanted_s, rel=1e-9)


def test_the_docs_say_what_each_optimizer_is_priced_as() -> None:
    """A row of docs/training.md for each: bytes of state and bytes that a step moves, per element in float32."""
    text = (Path(__file__).parents[3] / "docs" / "training.md").read_text(encoding="utf-8")
    said = {name: (int(state), int(moved)) for name, state, moved in ROW.findall(text)}
    found, option = weight("float32", "")
    rate = passes_s(1.0)
    assert said == {
        name: (
            round(parameter_bytes(NUMBERS, "float32", "float32", name).optimizer / NUMBERS),
            round((prices("float32", name).update_s(found, (option,)) - HOST.device.update_s) / rate / NUMBERS),
        )
        for name in OPTIMIZERS
    }


def test_momentum_is_read_and_written_again() -> None:
    held = nn.Parameter(torch.empty(NUMBERS, device="meta"))
    held.grad = torch.empty_like(held)
    kind = OPTIMIZERS["sgd-momentum"]
    steps = torch.optim.SGD([held], lr=0.1, **kind.options)
    steps.step()  # makes it
    with Moved() as moved:
        steps.step()
    assert moved.nbytes == 4 * NUMBERS * (3 + 2 * kind.state + kind.again)


def test_state_on_the_host_is_brought_and_taken_back() -> None:
    found, option = weight("bf16", "")
    here, there = (prices("bf16", "adamw", offload).update_s(found, (option,)) for offload in ("", "optimizer"))
    assert there - here == pytest.approx(2 * 2 * 4 * NUMBERS / HOST.device.host_link_bytes_s, rel=1e-9)


def test_parameters_on_the_host_are_updated_there() -> None:
    """Gradients go there, and what is computed with comes back."""
    found, option = weight("bf16", "")
    device = HOST.device
    wanted_s = (4 * 7 + 4 + 2) * NUMBERS / device.host_bandwidth_bytes_s + (4 + 2) * NUMBERS / device.host_link_bytes_s
    got_s = prices("bf16", "adamw", "parameters").update_s(found, (option,))
    assert got_s == pytest.approx(wanted_s + device.update_s, rel=1e-9)


@pytest.mark.parametrize(("precision", "each"), [("float32", 4 * 3), ("bf16", 4 * 3 + 4 + 2)])
@pytest.mark.parametrize(("factor", "share"), [("", 1.0), ("d0", 0.5), ("d0/each", 0.5)])
def test_gradients_of_microbatches_add_up(precision: str, each: int, factor: str, share: float) -> None:
    """Two are read and one is written, after a cast where they are summed in another dtype."""
    found, option = weight(precision, factor)
    wanted_s = HOST.device.launch_s + HOST.device.memory_s(each * NUMBERS * share)
    assert prices(precision, "adamw").adding_s(found, (option,)) == pytest.approx(wanted_s, rel=1e-9)
