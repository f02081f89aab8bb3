"""The hand-written emitted model on real ranks against the single device."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from autopar.runtime import count
from tests.helpers.emitted import LAYERS, Plain, batch, sharded
from tests.helpers.ranks import on_new_ranks, on_ranks

MESHES = [(2, 2), (1, 2), (2, 1), (1, 4), (4, 1)]


def _plain() -> Plain:
    torch.manual_seed(0)
    return Plain().double()


def _built(sizes):
    return sharded(sizes)().double().load_full(_plain().state_dict())


def _close(got, wanted, tolerance=1e-11):
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert got[name] is None, name
        else:
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def _steps(sizes):
    plain, model = _plain(), _built(sizes)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    ids, labels = batch()
    local = model.shard_batch(ids, labels)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(2):  # gradients accumulate
            whole = plain(ids, labels)
            whole["loss"].backward()
            loss = model.train_step(*local)
        torch.testing.assert_close(loss, whole["loss"].detach(), rtol=1e-12, atol=1e-12)
        _close(model.full_grads(), {n: p.grad for n, p in plain.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
    # the key bias has gradient 0: AdamW scales its rounding up
    _close(model.full_state_dict(), plain.state_dict(), 1e-9)
    out = model(ids=local[0], labels=local[1])
    torch.testing.assert_close(model.full(out).logits, plain(ids, labels)["logits"], rtol=1e-11, atol=1e-11)
    out.loss.backward()  # the user's own backward
    return float(loss)


@pytest.mark.parametrize("sizes", MESHES)
def test_two_accumulated_adamw_steps_equal_the_single_device(sizes):
    losses = on_ranks(sizes[0] * sizes[1], _steps, sizes)
    assert len(set(losses)) == 1


def _parameters(sizes):
    plain, model = _plain(), _built(sizes)
    assert dict(model.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, p in plain.named_parameters():
        q = model.get_parameter(name)
        assert isinstance(q, DTensor) and q.shape == p.shape
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        torch.testing.assert_close(whole, plain.state_dict()[name])


def test_parameters_are_dtensors_with_original_names_and_order():
    on_ranks(4, _parameters, (2, 2))


def _grads_after(sizes, change):
    plain, model = _plain(), _built(sizes)
    ids, labels = batch()
    change(plain), change(model)
    plain(ids, labels)["loss"].backward()
    model.train_step(*model.shard_batch(ids, labels))
    _close(model.full_grads(), {n: p.grad for n, p in plain.named_parameters()})


def _freeze(model):
    model.get_parameter("layers.1.qkv.weight").requires_grad_(False)


def _reload(model):
    state = {k: v.clone() * 2 for k, v in model.state_dict().items() if k.startswith("layers.")}
    model.load_state_dict(state, assign=True, strict=False)


@pytest.mark.parametrize("change", [_freeze, _reload])
def test_the_forward_follows_what_users_do_to_parameters(change):
    on_ranks(4, _grads_after, (2, 2), change)


def _compiled(sizes):
    import torch._dynamo.utils as utils

    made = utils.counters["stats"]["unique_graphs"]  # of the process that these ranks were forked from
    eager, model = _built(sizes), _built(sizes).compile_blocks(backend="aot_eager")
    ids, labels = batch()
    local = eager.shard_batch(ids, labels)
    with count() as first:
        a = eager.train_step(*local)
    with count() as second:
        b = model.train_step(*local)
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    _close(model.full_grads(), eager.full_grads())
    regathered = [c for c in first if c.name in ("up.weight", "down.weight") and c.kind == "all_gather"]
    assert len(regathered) == 2 * 2 * LAYERS  # once forward, once backward
    assert len(first) - len(second) == 2 * LAYERS  # compiled blocks keep their gathered weights
    return utils.counters["stats"]["unique_graphs"] - made


def test_compiled_blocks_are_equal_and_one_graph_serves_all_instances():
    graphs = on_new_ranks(2, _compiled, (2, 1), timeout_s=120)
    assert graphs == [1, 1]
