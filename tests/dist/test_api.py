"""`autopar.compile` on ranks: searched once, run everywhere, equal to one device; saved folders run without model
code."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.bundle import Bundle
from autopar.errors import PlanError, RunError
from models import mlp
from tests.helpers.fused import Fused
from tests.helpers.ranks import on_new_ranks, on_ranks

ROOT = Path(__file__).resolve().parents[2]


def model_and_batch(rows=8):
    torch.manual_seed(0)
    model, batch = mlp.tiny(batch=rows)
    return model.double(), tuple(t.double() if t.is_floating_point() else t for t in batch)


def trained_alone(steps, make):
    """Losses and parameters of the plain model."""
    model, batch = model_and_batch()
    optimizer, losses = make(model.parameters()), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        losses.append((loss.item(), float(norm)))
    return losses, {n: p.detach() for n, p in model.named_parameters()}


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


def train(cluster, options, name, steps=3):
    model, batch = model_and_batch()
    compiled = autopar.compile(model, cluster, batch, time_limit_s=5.0, **options)
    local, losses = compiled.shard_batch(*batch), []
    optimizer = OPTIMIZERS[name](compiled.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = compiled.train_step(*local)
        norm = nn.utils.clip_grad_norm_(compiled.parameters(), 0.05)
        optimizer.step()
        losses.append((loss.item(), float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)))
    names = list(compiled.state_dict())
    again = compiled.state_dict()
    compiled.load_state_dict(again)
    compiled.load_state_dict({**again, "nobody": torch.zeros(1)}, strict=False)
    return losses, compiled.module.full_state_dict(), names, compiled.plan.to_json()


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "adamw"), ({"recipe": "tp"}, "sgd"), ({"recipe": "zero3"}, "adamw"), ({"recipe": "ddp"}, "sgd")],
)
def test_training_equals_one_device(options, name):
    losses, wanted = trained_alone(3, OPTIMIZERS[name])
    results = on_ranks(2, train, "cpu:1x2", options, name)
    assert results[0][3] == results[1][3]  # all ranks have rank 0's plan
    for got, state, names, _ in results:
        assert names == list(state) == list(model_and_batch()[0].state_dict())
        torch.testing.assert_close(torch.tensor(got), torch.tensor(losses), rtol=1e-9, atol=1e-9)
        for key, value in wanted.items():
            torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-9)


def searches():
    calls = []
    from autopar.search import SEARCHES

    def counted(problem, **options):
        calls.append(problem.name)
        return SEARCHES["greedy"](problem, **options)

    model, batch = model_and_batch()
    compiled = autopar.compile(model, "cpu:1x2", batch, search=counted)
    return len(calls), compiled.plan.to_json()


def test_only_rank_0_searches():
    (first, plan), (second, same) = on_ranks(2, searches)
    assert first > 0 and second == 0 and plan == same


def infeasible():
    model, batch = model_and_batch()
    autopar.compile(model, "cpu:1x2", batch, recipe="nonsense")


def test_an_error_of_the_search_is_everybodys():
    with pytest.raises(RunError, match=r"(?s)rank [01] of 2 failed.*unknown recipe 'nonsense'"):
        on_new_ranks(2, infeasible, timeout_s=20)


def saves(shared, own, taken):
    """What the ranks of two nodes find in a folder of both and in one of each node, which they all save to again and
    again, and how the last save to what is no folder ends. The first rank saves once more by itself."""
    model, batch = model_and_batch()
    rank = torch.distributed.get_rank()
    compiled = autopar.compile(model, "cpu:1x4", batch, recipe="ddp")
    compiled.bundle = replace(compiled.bundle, constants={"of": torch.tensor([7])})
    for _ in range(20):
        folders = compiled.save(shared), compiled.save(f"{own}/{rank // 2}")
    if rank == 0:
        compiled.save(shared)
    try:
        compiled.save(taken)
    except PlanError as error:
        torch.distributed.barrier()
        return [
            (sorted(p.name for p in folder.iterdir()), Bundle.load(folder).constants["of"].tolist())
            for folder in folders
        ], str(error)


def test_any_ranks_save(tmp_path):
    (tmp_path / "file").write_text("taken")
    files = ["README.md", "constants.pt", "plan.json", "sharded.py"]
    for found, error in on_ranks(4, saves, str(tmp_path / "plan"), str(tmp_path / "nodes"), str(tmp_path / "file")):
        assert found == [(files, [7])] * 2 and "file is a file" in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "nodes", "plan"] and sorted(
        p.name for p in (tmp_path / "nodes").iterdir()
    ) == ["0", "1"]


class Odd(Exception):
    """Takes other arguments than it gives its base: pickle cannot make it again."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


def ends_in(kind):
    """What each rank gets where the planning on rank 0 ends in `kind`, and whether ranks can talk after that."""

    def search(problem, **options):
        raise {
            "type": TypeError("wrong"),
            "odd": Odd("search", "odd"),
            "open": OSError("a file", open(os.devnull)),  # noqa: SIM115
            "stop": KeyboardInterrupt(),
        }[kind]

    model, batch = model_and_batch()
    try:
        autopar.compile(model, "cpu:1x2", batch, search=search)
    except BaseException as error:  # noqa: BLE001
        said = type(error).__name__, str(error), getattr(error, "__notes__", [])
    torch.distributed.barrier()
    return said


@pytest.mark.parametrize(
    ("kind", "first", "second", "text"),
    [
        ("type", "TypeError", "TypeError", "wrong"),
        ("odd", "Odd", "AutoparError", "rank 0 ended with Odd: search: odd"),
        ("open", "OSError", "AutoparError", "rank 0 ended with OSError: "),
        ("stop", "KeyboardInterrupt", "KeyboardInterrupt", ""),
    ],
)
def test_whatever_ends_planning_on_rank_0_ends_it_everywhere(kind, first, second, text):
    (name, _, _), (other, said, notes) = on_ranks(2, ends_in, kind)
    assert (name, other) == (first, second) and text in said
    assert notes[0].startswith("on rank 0:\nTraceback") and "in search" in notes[0]


def infer():
    model, (x, _) = model_and_batch()
    body = nn.Sequential(model.embed, *model.layers, model.head)
    compiled = autopar.compile(body, "cpu:1x2", (x,), mode="inference", recipe="tp")
    with torch.no_grad():
        out = compiled(*compiled.shard_batch(x))
    return compiled.module.full(out), body(x).detach(), [p.grad for p in compiled.parameters()]


def test_inference():
    for got, wanted, grads in on_ranks(2, infer):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        assert grads == [None] * len(grads)


class Pair(nn.Module):
    """Loss and logits as a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y):
        out = self.linear(x)
        return F.mse_loss(out, y), {"out": out, "more": [out.mean(), None]}


def structures():
    torch.manual_seed(0)
    compiled = autopar.compile(Pair(), "cpu:1x2", (torch.zeros(4, 4), torch.zeros(4, 4)), recipe="ddp")
    pair = compiled.module.full(compiled(torch.ones(2, 4), torch.ones(2, 4)))
    gpt = GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    )
    compiled = autopar.compile(gpt, "cpu:1x2", batch=4, seq=8, recipe="ddp")
    ids = torch.zeros(2, 8, dtype=torch.long)
    out = compiled.module.full(compiled(input_ids=ids, labels=ids))
    return (type(pair).__name__, sorted(pair[1]), pair[1]["more"][1], tuple(pair[1]["out"].shape)), (
        tuple(out.logits.shape),
        out.loss.item() == out["loss"].item(),
        list(out),
    )


def test_outputs_have_the_users_structure():
    for pair, out in on_ranks(2, structures):
        assert pair == ("tuple", ["more", "out"], None, (4, 4))
        assert out == ((4, 8, 64), True, ["loss", "logits"])


_LOADED = """
import sys
import torch, torch.distributed as dist
import autopar
dist.init_process_group("gloo")
model = autopar.load(sys.argv[1])
batch, state, wanted = torch.load(sys.argv[2])
model.load_full(state)
loss = model.train_step(*model.shard_batch(*batch))
assert abs(loss.item() - wanted) < 1e-10, (loss.item(), wanted)
assert list(model.state_dict()) == list(state)
for name in ("models", "transformers", "ortools", "autopar.capture", "autopar.planner", "autopar.search"):
    assert name not in sys.modules, name
print(f"loaded {dist.get_rank()}\\n", end="", flush=True)  # in one piece, even where nothing is buffered
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved plan, and a file with batch, weights and the loss of the plain model."""
    folder = tmp_path_factory.mktemp("saved")
    model, batch = model_and_batch()
    autopar.compile(model, "cpu:1x2", batch, recipe="tp").save(folder / "plan")
    torch.save((batch, model.state_dict(), model(*batch).item()), folder / "data.pt")
    return folder


def torchrun(*arguments, cwd=ROOT, ranks=2):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        *map(str, arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment)


def test_a_saved_folder_runs_without_model_code_and_without_search(saved):
    (saved / "load.py").write_text(_LOADED)
    done = torchrun(saved / "load.py", saved / "plan", saved / "data.pt")
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("loaded")) == ["loaded 0", "loaded 1"]


def test_the_emitted_file_trains_under_torchrun(saved):
    done = torchrun("sharded.py", cwd=saved / "plan")
    assert done.returncode == 0, done.stderr
    assert "step 0: loss" in done.stdout and "nan" not in done.stdout


def test_another_number_of_ranks_is_refused(saved):
    done = torchrun("sharded.py", cwd=saved / "plan", ranks=1)
    assert done.returncode != 0
    assert "RunError: wrong number of ranks: got 1, wanted 2" in done.stderr


def wrong_number(folder):
    try:
        return type(autopar.load(folder).module).__name__
    except RunError as error:
        return str(error)


def test_a_loaded_plan_says_how_many_ranks_it_wants(saved):
    for said in on_ranks(3, wrong_number, str(saved / "plan")):
        assert "2" in said and "3" in said and "ranks" in said


def _in_autocast(cluster):
    model, batch = model_and_batch()
    compiled = autopar.compile(model, cluster, batch, recipe="zero3")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RunError, match="autocast is on"):
        compiled.train_step(*compiled.shard_batch(*batch))
    with torch.autocast("cpu", enabled=False):
        compiled.train_step(*compiled.shard_batch(*batch))


def test_autocast_is_refused():
    on_ranks(2, _in_autocast, "cpu:1x2")


def _normed(cluster, converted):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()
    if converted:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    x, y = torch.randn(8, 3, 4, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)
    compiled = autopar.compile(model, cluster, (x, y), loss_fn=F.mse_loss, recipe="ddp")
    return (
        float(compiled.train_step(*compiled.shard_batch(x, y))),
        compiled.full_state_dict(),
        compiled.module.full_grads(),
    )


def test_batch_norms_that_synchronise_are_as_any():
    plain, synchronised = (on_ranks(2, _normed, "cpu:1x2", converted) for converted in (False, True))
    for (loss, state, grads), (other, theirs, gradients) in zip(plain, synchronised, strict=True):
        assert (
            loss == other
            and all(torch.equal(value, theirs[name]) for name, value in state.items())
            and all(torch.equal(value, gradients[name]) for name, value in grads.items())
        )


def fused():
    torch.manual_seed(0)
    return Fused().double(), torch.randn(4, 4, dtype=torch.float64)


def of_other_names():
    model, x = fused()
    compiled = autopar.compile(model, "cpu:1x2", (x,), recipe="zero3", time_limit_s=5.0)
    return float(compiled.train_step(*compiled.shard_batch(x))), compiled.full_state_dict()


def test_a_state_dict_of_other_names_is_not_asked_for_weights():
    model, x = fused()
    for loss, state in on_ranks(2, of_other_names):
        assert abs(loss - float(model(x))) < 1e-12 and list(state) == ["both.weight"]
        torch.testing.assert_close(state["both.weight"], model.both.weight.detach())
