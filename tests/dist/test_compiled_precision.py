"""Compiled blocks in mixed precision: gradients of the weights that they gather are summed over ranks in the dtype in
which all others are, and as many bytes are sent as are priced. In float16, whose losses are scaled, sums of many ranks
would not fit otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import autopar
from autopar.frontend import load
from autopar.frontend.loading import cast
from autopar.runtime import count
from autopar.verify.step import RankCase
from tests.helpers.captures import captured_once
from tests.helpers.ranks import on_new_ranks
from tests.helpers.tiny import TINY


def _steps(source: str, rank_case: RankCase) -> list[tuple[dict[str, Tensor], int]]:
    """One rank: whole gradients of a step, and the bytes of all that was scattered, eager and with compiled blocks."""
    found = []
    for compiled in (False, True):
        module = rank_case.build(source)
        if compiled:
            module.compile_blocks(backend="aot_eager")
        batch = module.shard_batch(**rank_case.batch)
        with count() as seen:
            module.train_step(*batch)
        scattered_bytes = sum(item.bytes for item in seen if item.kind == "reduce_scatter")
        found.append(({name: grad for name, grad in module.full_grads().items() if grad is not None}, scattered_bytes))
    return found


@pytest.mark.parametrize(
    ("name", "remat"),
    [("gpt", "full"), *(pytest.param("hf-gpt2", remat, marks=pytest.mark.slow) for remat in ("none", "full"))],
)
def test_gradients_of_gathered_weights_are_summed_as_wide_as_all_others(name: str, remat: str) -> None:
    loaded = load(TINY[name], batch=8, seq=16, device="cpu", train=True, labels=True)
    given = tuple(loaded.args), dict(loaded.kwargs)
    with captured_once((name, "bf16")):
        compiled = autopar.compile(loaded.model, "cpu:1x2", given, precision="bf16", recipe="zero3", remat=remat)
    assert compiled.captured is not None
    args, kwargs = cast((loaded.args, loaded.kwargs), torch.bfloat16)
    batch = dict(zip(compiled.captured.input_names, [*args, *kwargs.values()], strict=True))
    rank_case = RankCase(compiled.plan, dict(loaded.model.state_dict()), compiled.bundle.constants, batch)
    for (eager, eager_bytes), (grads, compiled_bytes) in on_new_ranks(
        2, _steps, compiled.source, rank_case, timeout_s=240
    ):
        assert compiled_bytes == eager_bytes > 0
        for name, grad in eager.items():
            assert grads[name].dtype == torch.float32
            torch.testing.assert_close(
                grads[name],
                grad,
                rtol=2.0**-6,
                atol=2.0**-7 * float(grad.abs().max()),
                msg=lambda text, name=name: f"{name}: {text}",
            )
