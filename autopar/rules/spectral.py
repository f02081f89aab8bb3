"""Fourier transforms, also of frames of signals: transformed dims are whole, all others can be cut. And real and
imaginary parts of complex numbers, where any dim can be cut."""

from __future__ import annotations

from typing import Any

from autopar.rules.arguments import Spec, given, line, named, overloads, rank_of, rule
from autopar.rules.language import Call
from autopar.rules.rule import Rule

ONE_DIM = "fft_fft fft_hfft fft_ifft fft_ihfft fft_irfft fft_rfft"
DIMS = "fft_fft2 fft_fftn fft_ifft2 fft_ifftn fft_irfft2 fft_irfftn fft_rfft2 fft_rfftn"


def transform(call: Call) -> str:
    """The transformed dims are those that the call names; else as many of the last ones as it gives sizes for; else
    all."""
    rank, arguments = rank_of(call), given(call)
    dims, sizes = arguments["dim"], arguments.get("s")
    if dims is None:
        dims = range(rank - len(sizes), rank) if sizes is not None else range(rank)
    whole = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
    return rule([line(rank, {dim: f"x{dim}!" for dim in whole})], [line(rank, {dim: f"y{dim}!" for dim in whole})])


def framed(dims_of_one: int) -> Spec:
    """stft and istft: the last dims of the operand, `dims_of_one` of them, are one signal or its frames, and stay
    whole. A dim of samples before them can be cut. The window is whole."""

    def spec(call: Call) -> str:
        kept = rank_of(call) - dims_of_one
        left, right = (
            line(len(t.shape), {dim: f"{name}{dim}!" for dim in range(kept, len(t.shape))})
            for name, t in (("x", call.ins[0]), ("y", call.outs[0]))
        )
        return rule([left, *("w!" for _ in call.ins[1:])], [right])

    return spec


PARTS = "_conj conj conj_physical imag real resolve_conj"
"""Linear operators on each element of one complex tensor."""

RULES: dict[Any, Rule] = {
    **{op: Rule(transform, linear="first") for op in overloads(f"{ONE_DIM} {DIMS}")},
    **{op: Rule(framed(2), linear="first") for op in named("istft.default")},
    **{op: Rule(framed(1), linear="first") for op in named("stft.default stft.center")},
    **{op: Rule("... -> ...", linear="all") for op in overloads(PARTS)},
    **{op: Rule("..., ... -> ...", linear="all") for op in overloads("complex")},
}
