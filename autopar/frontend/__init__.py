"""From what a user names (a Hugging Face config, a Python factory, a model) to a model and inputs for it."""

from __future__ import annotations

from autopar.frontend.inputs import inputs_for, max_positions
from autopar.frontend.loading import Loaded, load, stated_precision
from autopar.frontend.rules import load_rules

__all__ = ["Loaded", "inputs_for", "load", "load_rules", "max_positions", "stated_precision"]
