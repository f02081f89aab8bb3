"""Transfers between ranks whose backend reads the memory of the host alone: ranks that share GPUs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from autopar.errors import RunError
from autopar.runtime import Mesh, mesh, neighbours
from tests.helpers.ranks import living


def _exchanged(hosted: bool) -> list[list[float]]:
    """What each of two ranks has from itself and from the other, in order, and round the ring."""
    both, here = Mesh((2,), ("a",)), torch.distributed.get_rank()
    with mock.patch.object(neighbours, "sends_from_host", lambda *_: hosted):
        sends = [(peer, torch.tensor([10.0 * here + peer, float(number)])) for peer in (0, 1) for number in (0, 1)] + [
            (1 - here, torch.empty(0))
        ]
        receives = [(peer, torch.full((2,), torch.nan)) for peer in (0, 1) for _ in (0, 1)] + [
            (1 - here, torch.empty(0))
        ]
        neighbours.start_transfers(sends, receives, 0, both)()
        round_ = neighbours.start_shift(torch.full((3,), float(here)), 3, 0, both)()
    return [x.tolist() for _, x in receives] + [round_.tolist()]


@pytest.mark.parametrize("hosted", [False, True])
def test_all_that_is_sent_arrives(hosted: bool) -> None:
    for here, found in enumerate(living(2).run(_exchanged, hosted)):
        assert found == [[10.0 * peer + here, float(number)] for peer in (0, 1) for number in (0, 1)] + [[]] + [
            [1.0 - here] * 3
        ]


def _refused() -> str:
    with mock.patch.object(mesh, "sends_from_host", lambda *_: True), pytest.raises(RunError) as raised:
        Mesh((1,), ("refused",), places=2).meet()
    return str(raised.value)


def test_pipelines_on_gpus_that_ranks_share_are_refused() -> None:
    assert all("start one rank per GPU with NCCL (2 GPUs)" in message for message in living(2).run(_refused))


def test_only_gpus_over_gloo_are_sent_from_the_host() -> None:
    assert living(2).run(mesh.sends_from_host, "cpu") == [False, False] and living(2).run(
        mesh.sends_from_host, "cuda"
    ) == [True, True]
    assert not mesh.sends_from_host("cuda")  # no ranks here
