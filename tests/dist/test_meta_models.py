"""A model built on the meta device, planned and saved, runs from its folder like the model built for real."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import frontend
from autopar.errors import RunError
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny import TINY


def loaded(name, device):
    return frontend.load(TINY[name], batch=4, seq=16, device=device)


def run(folder, data):
    batch, state = torch.load(data)
    compiled = autopar.load(folder)
    compiled.load_state_dict(state)
    loss = compiled.train_step(*compiled.shard_batch(**batch))
    return loss.item(), compiled.module.full_grads()


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("hf-llama", "tp"),
        ("hf-bert", "tp_sp"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("hf-t5", "zero3"), ("hf-vit", "ddp"), ("hf-gpt2", "megatron"))
        ),
    ],
)
def test_a_folder_saved_from_a_model_on_meta_runs(name, recipe, tmp_path):
    empty, real = loaded(name, "meta"), loaded(name, "cpu")
    autopar.compile(empty.model, "cpu:1x2", (empty.args, empty.kwargs), recipe=recipe).save(tmp_path / "plan")
    torch.save((real.kwargs, real.model.state_dict()), tmp_path / "data.pt")
    wanted = real.model(**real.kwargs).loss
    wanted.backward()
    for loss, grads in on_ranks(2, run, tmp_path / "plan", tmp_path / "data.pt"):
        assert loss == pytest.approx(wanted.item(), rel=2e-6)
        for key, parameter in real.model.named_parameters():
            torch.testing.assert_close(grads[key], parameter.grad, rtol=2e-4, atol=2e-6)


class Secret(torch.nn.Module):
    """Keeps nothing of how its table was made."""

    def __init__(self, base):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0) * base, persistent=False)

    def forward(self, x):
        return (self.linear(x) * self.table).sum()


def build(folder):
    try:
        return autopar.load(folder).module
    except RunError as error:
        return str(error)


def test_a_folder_without_values_says_so_and_does_not_run(tmp_path):
    with torch.device("meta"):
        model = Secret(2.0)
    compiled = autopar.compile(model, "cpu:1x2", (torch.zeros(4, 4),), recipe="ddp")
    assert any("table of Secret has no values" in note for note in compiled.plan.notes)
    compiled.save(tmp_path / "plan")
    for said in on_ranks(2, build, tmp_path / "plan"):
        assert "the plan has no values of table" in said
