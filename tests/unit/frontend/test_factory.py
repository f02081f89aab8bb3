"""Specs that name a Python factory, and every way in which they can be wrong."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
import torch

from autopar.errors import CaptureError
from autopar.frontend import load

FILE = """
    from dataclasses import dataclass
    import torch
    from sibling import WIDTH

    @dataclass
    class Config:
        width: int = WIDTH

    class Net(torch.nn.Module):
        def __init__(self, width=Config().width):
            super().__init__()
            self.linear = torch.nn.Linear(width, 1)

        def forward(self, x, scale=1.0):
            return (self.linear(x) * scale).mean()

    def pair(batch):
        return Net(), (torch.randn(batch, WIDTH),)

    def triple(batch=2, seq=3):
        return Net(seq), [torch.randn(batch, seq)], {"scale": torch.ones(())}

    def needs(path, batch):
        return Net()

    def wrong():
        return Net(), torch.randn(2, 3)

    def broken():
        raise RuntimeError("the user's own")

    def sized(batch=3, seq=None):
        return Net(seq), (torch.randn(batch, seq),)

    NOT_CALLABLE = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(dedent(FILE))
    (tmp_path / "sibling.py").write_text("WIDTH = 5\n")
    (tmp_path / "bad_import.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("net", "sibling", "bad_import", "autopar_model_net"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("place", ["net.py", "./net.py", "net"])
def test_model_and_inputs(folder, place):
    path = list(sys.path)
    loaded = load(f"{place}:pair", batch=7, seq=1, dtype=torch.float64)
    assert sys.path == path
    assert loaded.args[0].shape == (7, 5) and loaded.args[0].dtype == torch.float64 and loaded.args[0].is_meta
    assert loaded.kwargs == {} and loaded.name == "net.pair"


def test_batch_seq_and_kwargs(folder):
    loaded = load("net.py:triple", batch=7, seq=11, device="cpu")
    assert loaded.args[0].shape == (7, 11) and list(loaded.kwargs) == ["scale"]
    assert loaded.model(*loaded.args, **loaded.kwargs).isfinite()


@pytest.mark.parametrize(
    ("name", "asked", "sizes"),
    [
        ("triple", (None, None), (2, 3)),
        ("triple", (7, None), (7, 3)),
        ("sized", (None, None), (3, 128)),
        ("sized", (None, 5), (3, 5)),
        ("pair", (None, None), (8, 128)),
    ],
)
def test_sizes_that_nobody_asks_for_are_the_factorys_own(folder, name, asked, sizes):
    """They were 8 and 128 whatever it says: a plan for sizes that the model's author did not mean."""
    loaded = load(f"net.py:{name}", batch=asked[0], seq=asked[1])
    assert (loaded.batch, loaded.seq) == sizes and tuple(loaded.args[0].shape) == (
        sizes[0],
        5 if name == "pair" else sizes[1],
    )


def test_file_in_a_package_imports_from_that_package(tmp_path):
    package = tmp_path / "mypackage_of_models"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("WIDTH = 4\n")
    (package / "model.py").write_text(
        "import torch\nfrom mypackage_of_models.sizes import WIDTH\n\n\ndef make():\n"
        "    return torch.nn.Linear(WIDTH, 1), (torch.randn(2, WIDTH),)\n"
    )
    assert load(f"{package}/model.py:make", batch=2, seq=1).args[0].shape == (2, 4)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("gpt2", ["cannot read the model 'gpt2'", "hf:FILE_OR_FOLDER"]),
        ("net.py", ["say which function makes the model: net.py:FUNCTION"]),
        ("gpt2/config.json", ["a Hugging Face config is hf:gpt2/config.json"]),
        ("./net:make", ["cannot read the model './net:make'", "path/to/file.py:factory"]),
        ("..nets:make", ["cannot read the model '..nets:make'", "package.module:factory"]),
        ("missing.py:make", ["no file missing.py"]),
        ("net.py:make", ["has no 'make'", "pair, triple, needs"]),
        ("net:make", ["has no 'make'"]),
        ("net.py:NOT_CALLABLE", ["is int, not callable"]),
        ("no_such_package.sub:make", ["no module 'no_such_package'"]),
        ("net.py:needs", ["the factory needs path", "at most batch= and seq="]),
        ("torch:randn", ["randn does not say which parameters it has", "a function of Python"]),
        ("net.py:wrong", ["the factory gave (Net, Tensor)", "(model, args tuple)"]),
        ("net.py:Config", ["the factory gave Config", "wanted a torch.nn.Module"]),
        ("net.py:Net", ["inputs for Net cannot be made", "(model, args)"]),
    ],
)
def test_what_is_wrong_is_said(folder, spec, words):
    with pytest.raises(CaptureError) as error:
        load(spec, batch=2, seq=4)
    for word in words:
        assert word in str(error.value)


def test_errors_of_the_users_code_go_through(folder):
    with pytest.raises(RuntimeError, match="the user's own"):
        load("net.py:broken", batch=2, seq=4)
    for spec in ("bad_import.py:make", "bad_import:make"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
            load(spec, batch=2, seq=4)
