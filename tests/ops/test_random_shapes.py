"""Every Triton family on shapes and options that nobody chose; the seeds are fixed, so that a failure comes again."""

import hypothesis.strategies as st
from cases import DEVICE, make
from hypothesis import HealthCheck, given, settings
from test_kernels import check, family, small_tiles  # noqa: F401  (fixtures)


@st.composite
def problems(draw):
    """Options of `make`; sizes stay small, because in the interpreter time goes with the number of tiles."""
    S = draw(st.integers(1, 40))
    cuts = sorted(draw(st.lists(st.integers(0, S), max_size=3)))
    packed = draw(st.booleans())
    G = draw(st.sampled_from([1, 2]))
    divisor = draw(st.sampled_from([2, 4]))
    reduce, z = draw(st.booleans()), draw(st.booleans())
    return {
        "B": 1 if packed else draw(st.integers(1, 2)),
        "S": S,
        "G": G,
        "H": G * draw(st.integers(1, 2)),
        "R": draw(st.integers(1, 5)),
        "N": divisor * draw(st.integers(1, 6)),
        "P": draw(st.integers(1, 20)),
        "divisor": divisor,
        "reduce": reduce,
        "z": z,
        "d": draw(st.booleans()),
        "norm": reduce and z and draw(st.booleans()),
        "weight": draw(st.booleans()),
        "cu_seqlens": [0, *cuts, S] if packed else None,
        "return_state": draw(st.booleans()),
        "seed": draw(st.integers(0, 1000)),
    }


@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(options=problems())
def test_random_shapes_in_fp32(family, small_tiles, options):  # noqa: F811
    check(family, make(**options, device=DEVICE))
