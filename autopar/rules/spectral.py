"""Fourier transforms: transformed dims are whole, all others are cut; and the parts of complex numbers, which any dim is cut of."""

from __future__ import annotations

from typing import Any

from autopar.rules.arguments import given, line, overloads, rank_of, rule
from autopar.rules.language import Call
from autopar.rules.rule import Rule

ONE_DIM = "fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft"
DIMS = "fft_fft2 fft_fftn fft_ifft2 fft_ifftn fft_irfft2 fft_irfftn fft_rfft2 fft_rfftn"
SHIFTS = "fft_fftshift fft_ifftshift"


def transform(call: Call) -> str:
    """The dims that a call names, or else the last ones that it gives sizes for, or all."""
    rank, arguments = rank_of(call), given(call)
    dims, sizes = arguments["dim"], arguments.get("s")
    if dims is None:
        dims = range(rank - len(sizes), rank) if sizes is not None else range(rank)
    whole = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    return rule([line(rank, {dim: f"x{dim}!" for dim in whole})], [line(rank, {dim: f"y{dim}!" for dim in whole})])


PARTS = "_conj conj conj_physical imag real resolve_conj"
"""Operators on one complex tensor, each number by itself and linear."""

RULES: dict[Any, Rule] = {
    **{op: Rule(transform, linear="first") for op in overloads(f"{ONE_DIM} {DIMS} {SHIFTS}")},
    **{op: Rule("... -> ...", linear="all") for op in overloads(PARTS)},
    **{op: Rule("..., ... -> ...", linear="all") for op in overloads("complex")},
}
