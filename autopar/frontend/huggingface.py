"""Models from Hugging Face config files: structure only, no weights, nothing is downloaded and no remote code is
run."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from autopar.errors import CaptureError
from autopar.text import first_line, near

QUANTISED = ("quantization_config", "compression_config")
"""What configs of quantised weights have."""


def build_model(where: str) -> nn.Module:
    """The model of a config file (or of the config.json in a folder), with fresh weights on torch's default device.

    The class is the first of `architectures`. Attention is scaled_dot_product_attention where the class has it, and no
    key-value cache is kept. Raises CaptureError when the file or the class is not there, they do not fit together, or
    the weights are quantised.
    """
    path = config_path(where)
    values = read_config(path)
    transformers = import_transformers(f"hf:{where}")
    model_class = architecture(transformers, values, path)
    check_whole_weights(values, path)
    with quiet(transformers):
        config = make_config(transformers, values, path)
        check_class(transformers, model_class, config, path)
        if hasattr(config, "use_cache"):
            config.use_cache = False
        model: Any = make_model(model_class, config, path)
    if model.loss_type is None:  # a class name that transformers cannot read: it would take this one and warn
        model.loss_type = "ForCausalLM"
    found: nn.Module = model
    return found


def stated_dtype(where: str) -> str | None:
    """The dtype that a config file says its weights are in, as "bfloat16", or those of the part that reads text where
    only that says one (Qwen3-VL); None where none is said."""
    values = read_config(config_path(where))
    parts = [values, values.get("text_config")]
    found = [part.get(name) for part in parts if isinstance(part, dict) for name in ("dtype", "torch_dtype")]
    return next((stated for stated in found if isinstance(stated, str)), None)


def config_path(where: str) -> Path:
    """The config file meant by a file or folder name."""
    path = Path(where)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise CaptureError(
            f"no Hugging Face config file {path} (looked from {Path.cwd()}); wanted a config.json or the folder it is "
            "in. Names on the hub are not looked up: download the model's config.json first"
        )
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The values of a config file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CaptureError(f"{path} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise CaptureError(
            f"{path} holds a JSON {type(values).__name__}; wanted an object with model_type and architectures"
        )
    return values


def architecture(transformers: Any, values: dict[str, Any], path: Path) -> Any:
    """The model class that a config names."""
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CaptureError(
            f'{path} has no "architectures" (got {names!r}), so the model class is unknown; add for example '
            '"architectures": ["LlamaForCausalLM"]'
        )
    found = getattr(transformers, names[0], None) if names[0].isidentifier() else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    raise CaptureError(
        f"{path}: transformers {transformers.__version__} has no model class "
        f"{names[0]!r}{near(names[0], dir(transformers))}. A model with its own code can be given as "
        "path/to/file.py:factory"
    )


def make_config(transformers: Any, values: dict[str, Any], path: Path) -> Any:
    """The config object of a config file's values."""
    kind = values.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise CaptureError(
            f'{path}: transformers {transformers.__version__} has no "model_type" {kind!r}'
            f"{near(str(kind), transformers.CONFIG_MAPPING)}"
        )
    strict = importlib.import_module("huggingface_hub.errors").StrictDataclassError
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(values)
    except (TypeError, ValueError, KeyError, AttributeError, strict) as error:
        raise CaptureError(f"{path}: {kind} refuses these values: {error}") from error


def check_whole_weights(values: dict[str, Any], path: Path) -> None:
    """Raise CaptureError where a config says that its weights are quantised: the model is made without, and would be
    priced with several times the bytes."""
    for name in QUANTISED:
        if values.get(name):
            raise CaptureError(
                f'{path} has a "{name}", and weights are planned as they are before they are quantised, in one dtype: '
                "take it out of the file to plan the model so"
            )


def check_class(transformers: Any, model_class: Any, config: Any, path: Path) -> None:
    """Raise CaptureError where a model class is for another kind of config, unless transformers itself makes it of that
    one: it would take what both have, and leave out the rest."""
    wanted, auto = model_class.config_class, vars(transformers.models.auto.modeling_auto)
    made = [auto[name].get(config.model_type, ()) for name in auto if name.endswith("_MAPPING_NAMES")]
    if not isinstance(config, wanted) and not any(
        model_class.__name__ in ([names] if isinstance(names, str) else names) for names in made
    ):
        raise CaptureError(
            f"{path}: {model_class.__name__} is made of a {wanted.__name__} (model_type "
            f"{wanted.model_type!r}), and model_type {config.model_type!r} is a {type(config).__name__}: make "
            '"model_type" and "architectures" those of one model'
        )


def make_model(model_class: Any, config: Any, path: Path) -> Any:
    """The model of a config."""
    try:
        return model_class(config)
    except (ImportError, TypeError, ValueError, LookupError, AttributeError, AssertionError, RuntimeError) as error:
        raise CaptureError(
            f"{path}: {model_class.__name__} cannot be made of these values: {first_line(error)}"
        ) from error


def import_transformers(what: str) -> Any:
    """The transformers package. Raises CaptureError that says how to install it; `what` is what it is needed for."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise CaptureError(f"{what} needs Hugging Face transformers: pip install 'autopar[hf]'") from error


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Let transformers log errors only, for a while."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
