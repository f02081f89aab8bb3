"""Every tiny model loads from its spec, trains, and follows its seed."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import CaptureError
from autopar.frontend import load, stated_precision
from autopar.frontend.loading import short_name
from tests.helpers.tiny import ROOT, TINY

BATCH, SEQ = 6, 12
FLOAT32_ONLY = {"hf-mixtral", "hf-gpt-oss"}  # torch's grouped_mm, which its experts call, has no float64 kernel


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


def tensors(loaded):
    return [x for x in (*loaded.args, *loaded.kwargs.values()) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", TINY)
def test_trains(name):
    dtype = torch.float32 if name in FLOAT32_ONLY else torch.float64
    loaded = load(TINY[name], batch=BATCH, seq=SEQ, device="cpu", dtype=dtype)
    loss = first(loaded.model(*loaded.args, **loaded.kwargs))
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    assert all(p.grad is not None and p.dtype == dtype for p in loaded.model.parameters() if p.requires_grad)
    assert all(t.shape[0] == BATCH and t.dtype in (dtype, torch.int64) for t in tensors(loaded))


def test_seed_decides_weights_and_inputs_and_leaves_the_callers_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a, b, c = (load(TINY["hf-gpt2"], batch=2, seq=8, device="cpu", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    for x, y, z in zip(a.model.parameters(), b.model.parameters(), c.model.parameters(), strict=True):
        assert torch.equal(x, y) and (x.unique().numel() < 2 or not torch.equal(x, z))
    assert torch.equal(a.kwargs["input_ids"], b.kwargs["input_ids"])
    assert not torch.equal(a.kwargs["input_ids"], c.kwargs["input_ids"])


def test_a_config_says_in_what_precision(tmp_path):
    llama, gpt2 = f"hf:{ROOT}/models/hf/llama3-8b.json", f"hf:{ROOT}/models/hf/gpt2.json"
    assert [stated_precision(llama, train=train) for train in (True, False)] == ["bf16", "bfloat16"]
    assert stated_precision(gpt2, train=True) == "float32"
    assert stated_precision(TINY["gpt"], train=False) is None  # that of the model which the factory makes
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "torch_dtype": "bfloat16"}')
    assert stated_precision(f"hf:{tmp_path}", train=True) == "bf16"
    for text in ('{"dtype": null, "torch_dtype": "bfloat16"}', '{"text_config": {"dtype": "bfloat16"}}'):
        (tmp_path / "config.json").write_text(text)
        assert stated_precision(f"hf:{tmp_path}", train=True) == "bf16"
    (tmp_path / "config.json").write_text('{"torch_dtype": "float16"}')
    assert [stated_precision(f"hf:{tmp_path}", train=train) for train in (True, False)] == ["float32", "float16"]
    with pytest.raises(CaptureError, match="no Hugging Face config file"):
        stated_precision("hf:nowhere.json", train=True)


def test_short_names(tmp_path):
    assert short_name("hf:models/hf/gpt2.json") == "gpt2"
    assert short_name(f"hf:{tmp_path}/llama/config.json") == short_name(f"hf:{tmp_path}/llama/") == "llama"
    assert short_name("models/gpt.py:small") == short_name("models.gpt:small") == "gpt.small"


def test_a_model_is_no_factory(tmp_path):
    """It was called without inputs, and that error shown."""
    (tmp_path / "own.py").write_text("from torch import nn\nmodel = nn.Linear(3, 3)\n")
    with pytest.raises(
        CaptureError, match=r"model is a model, Linear; wanted what makes one, .*def made\(\): return model, "
    ):
        load(f"{tmp_path}/own.py:model", batch=1, seq=1)


def test_a_file_is_run_again_only_where_it_has_changed(tmp_path):
    """Each run registered its operators anew: rules were for others than the graph had."""
    where = tmp_path / "own.py"
    text = "from torch import nn\nRUN = []\ndef made():\n    RUN.append(0)\n    return nn.Linear(len(RUN), {}), ()\n"

    def shape():
        return tuple(load(f"{where}:made", batch=1, seq=1).model.weight.shape)

    where.write_text(text.format(3))
    assert [shape(), shape()] == [(3, 1), (3, 2)]
    where.write_text(text.format(5))
    assert shape() == (5, 1)
    where.write_text("raise ValueError('on the way')")
    with pytest.raises(ValueError, match="on the way"):
        shape()
    where.write_text(text.format(5))
    assert shape() == (5, 1)
