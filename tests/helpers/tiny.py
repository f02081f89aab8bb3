"""Every tiny model by name, as a spec for `autopar.frontend.load`: tests run over them all."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HF = (
    "gpt2",
    "llama",
    "llama-2kv",
    "bert",
    "t5",
    "vit",
    "resnet",
    "mixtral",
    "phi3",
    "neox",
    "bloom",
    "clip",
    "whisper",
    "gpt-oss",
    "llama4",
)
OWN = ("mlp", "gpt", "cnn", "recommender", "moe")

TINY: dict[str, str] = {
    **{f"hf-{name}": f"hf:{ROOT}/models/hf/tiny/{name}.json" for name in HF},
    **{name: f"{ROOT}/models/{name}.py:tiny" for name in OWN},
}

DEEP = {"hf-llama-deep": f"hf:{ROOT}/models/hf/tiny/llama-deep.json"}
"""Of more blocks, for pipelines of many stages."""
