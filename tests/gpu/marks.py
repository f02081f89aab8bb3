"""The mark of tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
