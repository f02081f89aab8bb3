"""The captured graph of every tiny model computes what the model computes, at the captured sizes and at others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

from autopar import frontend
from autopar.capture import capture
from passes.interpret import Interpret
from tests.helpers.tiny import TINY

QUICK = ("hf-gpt2", "hf-llama-2kv", "hf-vit", "hf-resnet", "mlp", "recommender")
CASES = [
    pytest.param(name, mode, marks=() if name in QUICK and (mode == "train" or name == "hf-gpt2") else pytest.mark.slow)
    for name in TINY
    for mode in ("train", "inference")
]


def load(name, mode, batch, seq):
    # their grouped matmul has no float64 kernel outside of export
    dtype = torch.float32 if name in ("hf-mixtral", "hf-gpt-oss") else torch.float64
    return frontend.load(
        TINY[name], batch=batch, seq=seq, device="cpu", dtype=dtype, train=mode == "train", labels=mode == "train"
    )


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_the_graph_is_the_model(name, mode):
    first, other = load(name, mode, 4, 16), load(name, mode, 6, 12)
    captured = capture(first.model, first.args, first.kwargs, mode=mode)
    assert captured.hints.get("b") == 4
    compare(captured, first, mode)
    other.model.load_state_dict(first.model.state_dict())
    compare(captured, other, mode)


def compare(captured, loaded, mode):
    model = copy.deepcopy(loaded.model).train(mode == "train")
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    given = {**dict(zip(captured.input_names, loaded.args, strict=False)), **loaded.kwargs}
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    torch.manual_seed(3)
    wanted = [
        x for x in pytree.tree_leaves(as_plain(model(*loaded.args, **loaded.kwargs))) if isinstance(x, torch.Tensor)
    ]
    changed = {name: tensor.detach().clone() for name, tensor in held.items()}
    for name, tensor in before.items():
        held[name].data.copy_(tensor)
    torch.manual_seed(3)
    runner = Interpret(captured.gm, {**held, **captured.constants})
    values = runner.run_named(given)
    assert sorted(runner.changed) == sorted(n for n, t in before.items() if not torch.equal(t, changed[n]))
    for name, value in runner.changed.items():
        close(value, changed[name], name)
    plain = [
        (value, about)
        for value, about in zip(values, captured.gm.meta["outputs"], strict=True)
        if about["kind"] != "mutation"
    ]
    for (value, about), right in zip(plain, wanted, strict=True):
        close(value, right, about["name"])
    if mode == "train":
        at = [about["kind"] for _, about in plain].index("loss")
        # Whisper's positions have none
        parameters = {name: held for name, held in model.named_parameters() if held.requires_grad}
        mine = torch.autograd.grad(plain[at][0], list(parameters.values()), retain_graph=True, allow_unused=True)
        theirs = torch.autograd.grad(wanted[at], list(parameters.values()), allow_unused=True)
        for name, a, b in zip(parameters, mine, theirs, strict=True):
            close(
                torch.zeros_like(parameters[name]) if a is None else a,
                torch.zeros_like(parameters[name]) if b is None else b,
                name,
            )


def as_plain(outputs):
    return dict(outputs) if hasattr(outputs, "to_tuple") else outputs


def close(got, wanted, name):
    """Within 1e-6 (float32: 1e-5): models cast logits and norms to float32 in places, wherever they come from."""
    tolerance = 1e-6 if wanted.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")
