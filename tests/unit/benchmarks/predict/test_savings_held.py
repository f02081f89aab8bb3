"""What each way to save memory takes off the walk of a given configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.memory import Habits
from autopar.memory.place import UPDATE
from autopar.memory.types import Place
from benchmarks.costmodel.predict import Setup
from tests.unit.benchmarks.predict.test_peak import OTHERS, SIZES, held, kept

ALONE = Setup(4, 1, 128)
ROWS, CLASSES = 4 * 128, 2048
ADAPTED = replace(SIZES, adapters=4, adapted=("qkv", "proj", "up", "gate", "down"), dropout=0.0)
MATRICES = 8 * 16 * 256**2
"""Elements of the frozen matrices of eight blocks: 4 of attention, 3 of four times the width."""


def place(habits: Habits, setup: Setup = ALONE, **sizes: object) -> Place:
    return held(habits, setup, replace(SIZES, **sizes) if sizes else SIZES).places[0]  # type: ignore[arg-type]


def adapted(habits: Habits, setup: Setup = ALONE) -> Place:
    return held(habits, setup, ADAPTED).places[0]


def test_paged_state_is_not_on_the_device() -> None:
    assert "optimizer" not in place(replace(OTHERS, moment_bytes=0.0)).rest and "optimizer" in place(OTHERS).rest


def test_gradients_that_are_used_up_do_not_add_up() -> None:
    """Those of eight blocks are not there at once, and no optimizer runs behind the backward."""
    short = Setup(1, 1, 128)
    many, few = (place(replace(OTHERS, spends=on, fused_update=True), short) for on in (False, True))
    assert many.phases[UPDATE] - few.phases[UPDATE] == pytest.approx(many.rest["gradients"])
    assert "gradients" not in few.rest
    assert many.phases["backward"] > few.phases["backward"]


def test_a_loss_in_chunks_takes_a_chunk_in_32_bits() -> None:
    """Of 4 bytes for a class the log-softmax stays; another copy, its gradient and that of the logits are parts."""
    whole, parts = (place(replace(OTHERS, loss_chunks=n)).peak_bytes for n in (1, 8))
    assert whole - parts > ROWS * CLASSES * 4
    kept_there = [place(replace(OTHERS, loss_chunks=n)).kept_bytes[0] for n in (1, 8)]
    assert kept_there[0] == pytest.approx(kept_there[1])


def test_a_fused_loss_keeps_logits_as_they_are() -> None:
    eager, fused, none = (
        place(habits).kept_bytes[0]
        for habits in (
            OTHERS,
            replace(OTHERS, loss_fused=True),
            replace(OTHERS, loss_fused=True, loss_chunks=8, chunked_logits=True),
        )
    )
    assert eager - fused == pytest.approx(ROWS * CLASSES * 2)
    assert fused - none == pytest.approx(ROWS * CLASSES * 2 * 7 / 8)


def test_frozen_weights_in_4_bits_are_made_whole_for_each_product() -> None:
    full, few = (adapted(replace(OTHERS, frozen_bytes=n)) for n in (0.0, 0.5))
    assert full.rest["weights"] - few.rest["weights"] == MATRICES * 1.5
    made = [entry.nbytes for entry in few.entries if entry.kind == "temporaries" and entry.node.startswith("blocks")]
    assert full.peak_bytes - few.peak_bytes == pytest.approx(MATRICES * 1.5 - sum(made), rel=0.05)


def test_products_of_4_bit_weights_may_keep_their_rows() -> None:
    """Adapters on queries alone keep the rows of those; bitsandbytes' products keep all."""
    sizes = replace(ADAPTED, adapted=("qkv",))
    plain, rows = (
        held(replace(OTHERS, frozen_bytes=0.5, keeps_rows=on), ALONE, sizes).places[0].kept_bytes[0]
        for on in (False, True)
    )
    # what the feed-forward layer's products read, a norm's result and the product of gate and up; attention's is kept
    assert rows - plain == pytest.approx(8 * ROWS * (256 + 1024) * 2, rel=0.02)


def test_blocks_on_the_host_leave_those_at_work() -> None:
    here, there = (place(replace(OTHERS, hosts_blocks=on)).kept_bytes[0] for on in (False, True))
    assert here - there > 0.5 * here


def test_gradients_without_synchronisation_are_whole() -> None:
    """Of fully sharded weights, once there are several microbatches; with flat parameters also those of frozen ones."""
    sharded = Setup(1, 2, 128, dp=2, zero=3)
    cut, whole = (place(replace(OTHERS, sums_last=on), sharded).rest["gradients"] for on in (False, True))
    assert whole == pytest.approx(cut, rel=0.02)  # a half in 32 bits, all in 16
    once = replace(sharded, microbatches=1)
    assert place(replace(OTHERS, sums_last=True), once).rest["gradients"] == pytest.approx(cut)
    few, flat = (adapted(replace(OTHERS, sums_last=True, flat=on), sharded).rest["gradients"] for on in (False, True))
    assert flat - few == pytest.approx(MATRICES * 2, rel=0.02)


def test_weights_on_the_host_are_there_while_they_are_gathered() -> None:
    sharded = Setup(1, 1, 128, dp=2, zero=3)
    here, there = (place(replace(OTHERS, hosts_weights=on), sharded) for on in (False, True))
    assert "weights" not in there.rest and here.peak_bytes - there.peak_bytes == here.rest["weights"]


def test_compilers_keep_a_sum_and_not_its_terms() -> None:
    """A product with an adapter's beside it: both are as large as their sum."""
    terms, sums = (adapted(replace(OTHERS, fused=True, keeps_sums=on)).kept_bytes[0] for on in (False, True))
    assert terms > sums
    assert kept(held(replace(OTHERS, fused=True, keeps_sums=True))) == kept(held(replace(OTHERS, fused=True)))
