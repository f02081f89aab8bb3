"""Emitted programs name the device of all that they make: on a GPU there are tensors of the CPU else, which every CPU
agrees with."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.remat import rematerialised
from tests.helpers.tiny import TINY
from tests.helpers.verify import Sizes, by_stages, planned, subject

MAKERS = {
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}


class _Made(TorchFunctionMode):
    """Notes what is made without a word about where."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).split(".")[1] if isinstance(func, torch._ops.OpOverload) else getattr(func, "__name__", "")
        if name in MAKERS and kwargs.get("device") is None:
            at = next(
                frame
                for frame in reversed(traceback.extract_stack()[:-1])
                if not frame.filename.endswith("torch/_ops.py")
            )
            if "/torch/" not in at.filename:  # what torch makes for itself is its own
                self.found.append(f"{name} in {at.filename.rpartition('/')[2]}:{at.name}")
        return func(*args, **kwargs)


def _step(source: str, rank_case: RankCase) -> list[str]:
    """One rank: what a step and an evaluation make so."""
    module = rank_case.build(source)
    batch = module.shard_batch(**rank_case.batch)
    module.train_step(*batch)
    with _Made() as made:
        module.train_step(*batch)
        with torch.no_grad():
            module(*batch)
    return list(dict.fromkeys(made.found))


FAST: list[tuple[str, Sizes, str]] = [
    ("hf-llama", (2,), "ddp"),
    ("hf-t5", (2,), "ddp"),
    ("hf-bloom", (2,), "ddp"),
    ("hf-gpt-oss", (2,), "ddp"),
    ("hf-clip", (2,), "ddp"),
    ("hf-llama", (2,), "cp"),
    ("hf-gpt2", (2,), "ulysses"),
    ("hf-mixtral", (2,), "ep"),
    ("gpt", (2,), "zero3"),
    ("hf-gpt2", (2,), "random 0"),
    ("hf-resnet", (2,), "spatial"),
]
CASES = [
    *FAST,
    *(pytest.param(name, (2,), "ddp", marks=pytest.mark.slow) for name in TINY if (name, (2,), "ddp") not in FAST),
]


def test_what_names_no_device_is_seen() -> None:
    case = subject("hf-llama").case(planned(subject("hf-llama"), (2,), "ddp"))
    plain = case.source().replace(", device=MESH.device_type", "")
    assert plain != case.source() and all(
        "arange in" in rank[0] for rank in living(2).run(_step, plain, case.rank_case)
    )


@pytest.mark.parametrize(("schedule", "virtual", "remat"), [("1f1b", 1, False), ("interleaved_1f1b", 2, True)])
def test_so_does_a_pipeline(schedule: str, virtual: int, remat: bool) -> None:
    who = subject("hf-gpt2")
    made = by_stages(who, (1,), "single", 2, 4, schedule, virtual)
    case = who.case(rematerialised(who, made, "full") if remat else made)
    assert not [each for rank in living(2).run(_step, case.source(), case.rank_case) for each in rank]


@pytest.mark.parametrize(("name", "sizes", "how"), CASES)
def test_a_step_names_the_device_of_what_it_makes(name: str, sizes: Sizes, how: str) -> None:
    case = subject(name).case(planned(subject(name), sizes, how))
    found = living(2).run(_step, case.source(), case.rank_case)
    assert not [each for rank in found for each in rank]
