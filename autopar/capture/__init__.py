"""From a model to the captured graph: torch.export on a meta shadow, then the passes. See docs/internals.md."""

from autopar.capture.capture import capture
from autopar.capture.captured import Captured
from autopar.capture.lift_dtype import lift
from autopar.capture.state import own_state

__all__ = ["Captured", "capture", "lift", "own_state"]
