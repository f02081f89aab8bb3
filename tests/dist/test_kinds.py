"""Plans for two kinds of devices on real ranks, in float64: places with other numbers of blocks, weights tied over both
kinds."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from autopar import joint
from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.kinds import two_kinds
from tests.helpers.verify import BATCH, SEQ, Subject

BLOCKS = 8


class _Deep(Subject):
    def batch(self, batch: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (batch, seq), generator=torch.Generator().manual_seed(5))
        return dict.fromkeys(self.captured.input_names, ids)


@cache
def deep() -> Subject:
    """A GPT-2 of eight blocks, its head tied to the embedding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=BLOCKS,
            n_embd=32,
            n_head=4,
            vocab_size=64,
            n_positions=32,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    ids = torch.zeros(BATCH, SEQ, dtype=torch.long)
    return _Deep("deep", "train", capture(model, (), {"input_ids": ids, "labels": ids}), model.state_dict())


@pytest.mark.parametrize(
    ("recipe", "cluster", "mesh"),
    [
        ("1f1b", two_kinds("cpu:1x2", 2.0), (2,)),
        ("zero_bubble", two_kinds("cpu:1x1", 1.5), (1,)),
        ("pp_zero3", Cluster.parse("cpu:1x2+cpu:2x1"), (2,)),
        ("zero3", two_kinds("cpu:1x2", 4.0), None),
    ],
    ids=["uneven 1f1b", "uneven V", "unequal nodes", "one stage"],
)
def test_equals_one_device(recipe: str, cluster: Cluster, mesh: tuple[int, ...] | None) -> None:
    who = deep()
    made = joint.plan(
        who.captured.gm,
        who.captured.hints,
        Request(cluster, Settings("train"), recipe=recipe, mesh=mesh, time_limit_s=20.0),
        model=who.name,
        graph_hash=who.captured.graph_hash,
    )
    if "slow" in str(made.cluster) and made.places > 1:
        at = Cluster.from_dict(dict(made.cluster)).places(made.places, made.mesh)
        each = {
            at.device(p).name: sum(
                stop - first for s in made.stages if s.place == p for first, stop in s.blocks.values()
            )
            for p in range(2)
        }
        assert each["CPU core"] > each["slow"] > 0 and sum(each.values()) == BLOCKS
    report = who.verified(made)
    assert report.ok, [row for row in report.rows if not row.ok][:4]
