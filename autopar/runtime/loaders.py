"""Which samples of a global batch a rank loads, where each rank has a loader of its own.

Ranks along the mesh axes that cut the samples of every input have samples of their own; the others, which work on one
sample together (tensor, sequence, context and pipeline parallel ranks), load the same. What they load is cut further as
the plan says: along the sequence, or by axes that cut samples of some inputs only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from autopar.layout import cutters, parse, sections_of, show

if TYPE_CHECKING:
    from autopar.runtime.batch import Dims
    from autopar.runtime.mesh import Mesh

BATCH = "b"
"""The symbol of the batch among the sizes of inputs."""


def loading_axes(inputs: Mapping[str, str], dims: Dims) -> tuple[int, ...]:
    """The mesh axes along which each rank loads its own samples: the longest common prefix, major first, of the axes
    that cut the batch dim of every input. A batch that is cut in sections contributes none, since a rank's part is not
    contiguous then."""
    cuts = []
    for name, layout in inputs.items():
        if BATCH in dims.get(name, ()):
            entries = parse(layout)
            axes = cutters(entries, list(dims[name]).index(BATCH))
            cuts.append(axes if all(len(sections_of(entries[a])) == 1 for a in axes) else ())
    together = zip(*cuts, strict=False)
    first_apart = next((n for n, axes in enumerate(together) if len(set(axes)) > 1), min(map(len, cuts), default=0))
    return cuts[0][:first_apart] if cuts else ()


def share(axes: tuple[int, ...], mesh: Mesh) -> tuple[int, int]:
    """The number of loaders that share a global batch, and the number of this rank's loader. Loader i has the i-th
    contiguous part of the batch."""
    number = 0
    for axis in axes:
        number = number * mesh.sizes[axis] + mesh.coord[axis]
    return math.prod(mesh.sizes[axis] for axis in axes), number


def loaded(inputs: Mapping[str, str], dims: Dims) -> dict[str, str]:
    """How the part that one loader gave is cut further, by input: its layout with `R` on the loading axes, where it has
    a batch dim."""
    axes = loading_axes(inputs, dims)
    return {
        name: show(
            tuple(
                "R" if axis in axes and BATCH in dims.get(name, ()) else entry
                for axis, entry in enumerate(parse(layout))
            )
        )
        for name, layout in inputs.items()
    }
