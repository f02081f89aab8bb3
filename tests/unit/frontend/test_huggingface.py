"""Hugging Face config files: the published sizes, no network, no noise, and clear errors."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from autopar.errors import CaptureError
from autopar.frontend.huggingface import build_model, check_class
from tests.helpers.tiny import DEEP, ROOT, TINY

CONFIGS = ROOT / "models" / "hf"
# Parameters as counted from the published checkpoints (tied ones once), in millions.
PUBLISHED = {
    "gpt2": 124.44,
    "llama3-8b": 8030.26,
    "llama3.1-8b": 8030.26,
    "llama3.2-1b": 1235.81,
    "llama3-70b": 70553.71,
    "llama3-405b": 405853.39,
    "bert": 109.51,
    "t5": 60.51,
    "vit": 86.57,
    "resnet50": 25.56,
    "mixtral-8x7b": 46702.79,
    "gemma3-27b": 27009.35,
    "deepseek-v3": 671026.40,
}


def test_every_config_has_a_published_size():
    assert sorted(PUBLISHED) == sorted(path.stem for path in CONFIGS.glob("*.json"))
    assert {f"hf-{path.stem}" for path in (CONFIGS / "tiny").glob("*.json")} == {
        name for name in (*TINY, *DEEP) if name.startswith("hf-")
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name):
    with torch.device("meta"):
        model = build_model(str(CONFIGS / f"{name}.json"))
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(PUBLISHED[name], abs=0.01)
    assert not getattr(model.config, "use_cache", False)


def test_folder_and_dropout_of_the_published_config(tmp_path):
    (tmp_path / "config.json").write_text((CONFIGS / "gpt2.json").read_text())
    with torch.device("meta"):
        model = build_model(str(tmp_path))
    assert model.config.resid_pdrop == 0.1


def test_loading_and_running_says_nothing():
    code = f"""if True:
        from autopar.frontend import load
        loaded = load({TINY["hf-gpt2"]!r}, batch=2, seq=4, device="cpu")
        loaded.model(**loaded.kwargs)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_verbosity_is_restored():
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    with torch.device("meta"):
        build_model(str(CONFIGS / "tiny" / "gpt2.json"))
    assert transformers.logging.get_verbosity() == transformers.logging.INFO
    transformers.logging.set_verbosity(before)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", ["config.json is not JSON"]),
        ("[1]", ["holds a JSON list"]),
        ({"model_type": "gpt2"}, ['no "architectures"', "LlamaForCausalLM"]),
        (
            LLAMA | {"architectures": ["LlamaForCasualLM"]},
            ["no model class 'LlamaForCasualLM'", "near: LlamaForCausalLM"],
        ),
        (LLAMA | {"architectures": ["LlamaConfig"]}, ["no model class 'LlamaConfig'"]),
        (LLAMA | {"model_type": "lama"}, ["no \"model_type\" 'lama'", "llama"]),
        (LLAMA | {"hidden_size": "large"}, ["llama refuses these values", "hidden_size"]),
        (LLAMA | {"hidden_size": 100, "num_attention_heads": 3}, ["llama refuses these values"]),
        (LLAMA | {"torch_dtype": "torch.bfloat16"}, ["llama refuses these values", "torch.bfloat16"]),
        (
            {"model_type": "bert", "architectures": ["RobertaForMaskedLM"]},
            [
                "RobertaForMaskedLM is made of a RobertaConfig (model_type 'roberta')",
                "model_type 'bert' is a BertConfig",
            ],
        ),
        (LLAMA | {"quantization_config": {"quant_method": "fp8"}}, ['"quantization_config"', "take it out"]),
        (LLAMA | {"pad_token_id": 32000}, ["LlamaForCausalLM cannot be made of these values", "Padding_idx"]),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(CaptureError) as error, torch.device("meta"):
        build_model(str(path))
    for word in (*words, str(path)):
        assert word in str(error.value)


def test_a_config_of_another_model_whose_class_transformers_takes():
    import transformers

    auto = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = next(kind for kind, name in auto.items() if name == "LlamaForCausalLM" and kind != "llama")
    config = transformers.CONFIG_MAPPING[kind]()
    assert not isinstance(config, transformers.LlamaConfig)
    check_class(transformers, transformers.LlamaForCausalLM, config, CONFIGS)


def test_missing_file_is_said(tmp_path):
    with pytest.raises(CaptureError, match=r"no Hugging Face config file .*not looked up"):
        build_model(str(tmp_path))


def test_missing_transformers_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CaptureError, match=r"pip install 'autopar\[hf\]'"):
        build_model(str(CONFIGS / "gpt2.json"))


def test_frontend_does_not_import_transformers():
    code = "import sys, autopar.frontend; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
