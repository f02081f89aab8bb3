"""Calls of every operator in the rule table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.unit.rules import samples_linalg as linalg
from tests.unit.rules import samples_maths as maths
from tests.unit.rules import samples_pointwise as pointwise
from tests.unit.rules import samples_views as views
from tests.unit.rules import samples_vision as vision
from tests.unit.rules.samples import Case

SAMPLES: dict[Any, Sequence[Case]] = {
    **pointwise.samples(),
    **views.VIEWS,
    **views.FACTORIES,
    **views.INDEXING,
    **maths.CONTRACTIONS,
    **maths.LOSSES,
    **maths.REDUCTIONS,
    **vision.VISION,
    **linalg.LINALG,
}
