"""Local sizes as source: evaluated on every rank they are what the layout says, at any run-time sizes."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import sympy

from autopar.codegen.sizes import comment, local, must_divide, shape, text
from autopar.codegen.tables import even_lines
from autopar.layout import local_shape, parse
from passes import facts
from passes._torch import size_functions

B, S = facts.symbol("b"), facts.symbol("s")


class _Mesh:
    def __init__(self, sizes: tuple[int, ...], coord: tuple[int, ...]) -> None:
        self.sizes, self.coord = sizes, coord

    def local(self, size: int, axes: tuple[int, ...]) -> int:
        layout = tuple("S0" if a in axes else "R" for a in range(len(self.sizes)))
        return local_shape((size,), layout, self.sizes, self.coord)[0]


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (S, "S0,R"),
        (S, "S0,S0"),
        (B, "S0,R"),
        (B, "R,S0"),
        (4 * S, "S0,S0"),
        (B * S, "S0,R"),
        (B + 1, "S0,R"),
        (257, "R,S0"),
        (12, "S0,S0"),
        (2 * S, "R,S0"),
    ],
)
def test_the_text_is_the_local_size(size: sympy.Expr | int, layout: str) -> None:
    sizes = (2, 3)
    code = local(size, parse(layout), 0, sizes, exact=(0,))
    for b, s in itertools.product((2, 4, 8), (2, 5, 11)):
        whole = size if isinstance(size, int) else int(size.subs({B: b, S: s}))
        for coord in itertools.product(*map(range, sizes)):
            space = {"b": b, "s": s, "MESH": _Mesh(sizes, coord)}
            assert eval(code, space) == local_shape((whole,), parse(layout), sizes, coord)[0], (code, b, s, coord)


PADDED = S + size_functions.PythonMod(8 - size_functions.PythonMod(S, 8), 8)


@pytest.mark.parametrize(
    "size",
    [
        PADDED,
        size_functions.FloorDiv(PADDED, 8),
        2 * size_functions.FloorDiv(PADDED, 8),
        size_functions.FloorDiv(PADDED, size_functions.FloorDiv(PADDED, 8)),
        B * size_functions.FloorDiv(S + 3, 2),
        size_functions.Mod(S + 1, 4),
        9 - size_functions.Mod(S, 8) * 2,
        size_functions.Min(S, 5),
        size_functions.Max(3, S) - S // 2,
        size_functions.FloorDiv(S * S - 1, S),
        size_functions.FloorDiv(7 * S, 3 * size_functions.FloorDiv(S, 2)),
        size_functions.FloorDiv(S * S, S + 3),
        size_functions.FloorDiv(B * S, 1 + size_functions.Mod(S, 4)),
        7 * size_functions.FloorDiv(S, 3) - PADDED,
    ],
)
def test_the_text_of_divisions_and_remainders_is_of_whole_numbers(size: sympy.Expr) -> None:
    """As torch writes them: `s + (8 - s % 8) % 8` of a padded sequence."""
    plain = facts._plain(size)
    for b, s in itertools.product((2, 3), (2, 5, 8, 9, 16, 23, 2**53 + 1)):
        got = eval(text(plain), {"b": b, "s": s, "min": min, "max": max})
        assert got == int(size.subs({B: b, S: s})) and isinstance(got, int), (text(plain), b, s)


@pytest.mark.parametrize(
    "number",
    [
        0.5 * size_functions.ToFloat(S),
        size_functions.FloatTrueDiv(1.0, size_functions.ToFloat(B)),
        size_functions.FloatPow(size_functions.ToFloat(S), 0.5),
        size_functions.OpaqueUnaryFn_sqrt(size_functions.ToFloat(S)),
        size_functions.FloatPow(size_functions.IntTrueDiv(S, 2), 2.0),
        size_functions.IntTrueDiv(B, 3),
        0.91893853320467274178 * size_functions.ToFloat(S),
        size_functions.FloorToInt(0.3 * size_functions.ToFloat(S)),
        size_functions.CeilToInt(size_functions.FloatPow(size_functions.ToFloat(S), 0.5)),
        1e-30 * size_functions.ToFloat(size_functions.Mod(S, 3)),
    ],
)
def test_the_text_of_numbers_made_of_sizes_has_every_digit(number: sympy.Expr) -> None:
    """Without a module; whole numbers stay such."""
    plain = facts._plain(number)
    for b, s in itertools.product((2, 3), (2, 5, 9, 16)):
        got, wanted = eval(text(plain), {"b": b, "s": s}), number.subs({B: b, S: s})
        assert got == pytest.approx(float(wanted), rel=4e-16), (text(plain), b, s)
        assert isinstance(got, int) or not number.is_integer


@pytest.mark.parametrize("by", [3, 5, 6, 8, 10])
@pytest.mark.parametrize("share", [0.3, 1.1, 1.25, 1.3, 2.0])
def test_whole_numbers_of_floats_are_those_of_the_model(share: float, by: int) -> None:
    """The capacity of an expert: floats are multiplied and divided in the order of the model."""
    tokens = share * size_functions.ToFloat(B * S)
    cases = {
        size_functions.CeilToInt(size_functions.FloatTrueDiv(tokens, float(by))): lambda n: math.ceil(share * n / by),
        size_functions.FloorToInt(tokens): lambda n: math.floor(share * n),
        size_functions.FloorToInt(size_functions.FloatTrueDiv(size_functions.ToFloat(B * S), share)): lambda n: (
            math.floor(n / share)
        ),
    }
    for size, wanted in cases.items():
        plain = facts._plain(size)
        code = compile(text(plain), text(plain), "eval")
        for b, s in itertools.product((1, 2, 3, 5, 6, 9, 10, 13, 22, 34, 44), (6, 10, 50, 1000, 1024)):
            got = eval(code, {"b": b, "s": s})
            assert isinstance(got, int) and got == wanted(b * s) == int(
                plain.xreplace({B: sympy.Integer(b), S: sympy.Integer(s)})
            ), (text(plain), b, s)


@pytest.mark.parametrize(
    ("sizes", "layout", "micro"),
    [
        ((B, S, 8), "S0,R", "S0"),
        ((B, S, 8), "S0,S1", "S0"),
        ((B, S, 8), "R,S0", "S0"),
        ((B, S, 8), "S0,S2", "R"),
        ((B * S, 12), "S0,S1", "S0"),
        ((6, B), "R,S0", "S1"),
        ((24, B), "S0,S0", "S0"),
    ],
)
def test_microbatches_have_equal_parts_of_the_local_shape(
    sizes: tuple[sympy.Expr | int, ...], layout: str, micro: str
) -> None:
    mesh, parts = (2, 3), 4
    codes = shape(sizes, parse(layout), mesh, (0, 1), micro, parts)
    for s, coord in itertools.product((2, 5, 11), itertools.product(*map(range, mesh))):
        space = {"b": 48, "s": s, "MESH": _Mesh(mesh, coord)}
        whole = [n if isinstance(n, int) else int(n.subs({B: 48, S: s})) for n in sizes]
        if micro != "R":
            whole[int(micro[1:])] //= parts
        assert tuple(eval(code, space) for code in codes) == local_shape(tuple(whole), parse(layout), mesh, coord), (
            codes,
            s,
            coord,
        )


def test_comments_are_short() -> None:
    assert comment((B, S, 512), parse("S0,S2"), (2, 4)) == "b/2 s 128"
    assert comment((B, 4 * S, 257), parse("S0,S2"), (2, 4), "S0", 8) == "b/16 4*s 257/4"
    assert text(S * 4) == "4*s" and text(B * S + 1) == "b*s + 1"


def test_what_surely_divides_reads_as_a_division() -> None:
    assert local(B, parse("S0,R"), 0, (2, 3), exact=(0,)) == "b // 2"
    assert local(4 * S, parse("S0,R"), 0, (2, 3)) == "2*s"
    assert local(S, parse("S0,R"), 0, (2, 3), exact=(0,)) == "MESH.local(s, (0,))"


def test_sizes_that_a_reshape_of_cut_dims_needs_to_be_even():
    b, s = B, S
    assert must_divide((b, 4, s), ("S0",), (b * 4, s), ("S0",), ()) == [(b, (0,))]
    assert must_divide((b * 4, s), ("S0",), (b, 4, s), ("S0",), ()) == [(b, (0,))]
    # the inputs are cut so: checked there
    assert must_divide((b, 4, s), ("S0",), (b * 4, s), ("S0",), (0,)) == []
    assert must_divide((b, s), ("S1",), (b * s,), ("R",), ()) == []
    assert must_divide((b, s, 8), ("S1",), (b, s, 2, 4), ("S1",), ()) == []
    assert must_divide((b, s, 8), ("S2",), (b, s, 2, 4), ("S2",), ()) == []  # plain sizes are checked when planning
    assert must_divide((b, s), ("S0", "S0"), (b * s,), ("S0", "S0"), (0,)) == [(b, (0, 1))]


@pytest.mark.parametrize("size", [B, B * S, B * (S + 8), B + S, B * B])
def test_sizes_of_a_microbatch_are_checked(size: sympy.Expr) -> None:
    """The whole formula with the microbatch's samples, whatever the batch is added to or multiplied by."""
    found: list[int] = []
    context = SimpleNamespace(plan=SimpleNamespace(microbatches=2), even={(text(size), (0,), 1): "reshape"})
    mesh = SimpleNamespace(even=lambda name, size, axes, why: found.append(size))
    (line,) = even_lines(context)  # type: ignore[arg-type]
    exec(line, {"b": 12, "s": 5, "MESH": mesh})
    assert found == [size.subs({B: 6, S: 5})]
