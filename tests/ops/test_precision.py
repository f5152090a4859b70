"""The standard of low precision, bf16 and fp16: every gradient within 0.5 % of the fp64 reference (relative L2).

Errors are pooled over independent inputs: a gradient of few elements scatters around the standard.
"""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from cases import DEVICE, make
from hypothesis import HealthCheck, Phase, given, settings
from test_kernels import GRADIENT_BOUND, Comparison, compare, family  # noqa: F401  (a fixture)
from test_random_shapes import problems

from mindspeed_mamba3_plugin.ops import reference, registry
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
GATES = {"Z": {}, "no Z": {"z": False}, "norm": {"norm": True}}
CALLS = {1: 8, 2: 6, 4: 6, 8: 4}  # by rank


def check_pooled(found: Iterable[Comparison], dtype: torch.dtype) -> None:
    """The relative L2 error of every gradient of all calls together, and of the output root mean square."""
    outs = []
    wrong, size = dict.fromkeys(GRADIENT_NAMES, 0.0), dict.fromkeys(GRADIENT_NAMES, 0.0)
    for one in found:
        outs.append(one.out)
        for name, ours, true in zip(GRADIENT_NAMES, one.ours, one.true, strict=True):
            if true is not None:
                wrong[name] += float((ours.cpu().double() - true).square().sum())
                size[name] += float(true.square().sum())
    errors = {name: (wrong[name] / size[name]) ** 0.5 for name in GRADIENT_NAMES if size[name]}
    errors["out"] = (sum(e**2 for e in outs) / len(outs)) ** 0.5
    bad = {name: error for name, error in errors.items() if not error < GRADIENT_BOUND[dtype]}
    assert not bad, bad


@pytest.fixture
def patience(request, family):  # noqa: F811
    many = any(name in request.node.name for name in ("no Z-bf16", "random_shapes[triton-gpu-bf16"))
    if registry.interpreted() and family.__name__.endswith(".gpu") and many:
        pytest.skip("many calls, each some seconds in the interpreter: runs on a GPU")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@pytest.mark.parametrize("R", CALLS)
def test_every_rank_and_gate(family, patience, R, gate, dtype):  # noqa: F811
    # fp16 is eight times as fine, and operands with the norm are fp32: nothing scatters up to the standard.
    seeds = range(CALLS[R] if dtype == torch.bfloat16 and "norm" not in gate else 1)
    S = 48 if R == 8 else 80
    calls = (make(1, S, R=R, N=32, P=32, **gate, dtype=dtype, device=DEVICE, seed=seed) for seed in seeds)
    check_pooled((compare(family, x) for x in calls), dtype)


@pytest.mark.parametrize("seed", [0, 3])
def test_bf16_where_an_output_nearly_cancels_before_the_norm(family, seed):  # noqa: F811
    """At rank 1 the first O is a multiple of v, here a tiny one that the norm divides by: with rounded operands dd
    was 7 % off."""
    x = make(1, 150, R=1, N=64, P=32, norm=True, dtype=torch.bfloat16, device=DEVICE, seed=seed)
    check_pooled([compare(family, x)], x.dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_random_shapes(family, patience, dtype):  # noqa: F811
    found = []
    # On a GPU every shape is compiled: fewer of them, but longer, and each with several inputs.
    examples, longer, inputs = (30 if dtype == torch.bfloat16 else 4, 1, 1) if registry.interpreted() else (3, 16, 12)

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(options=problems())
    def collect(options):
        cu = options["cu_seqlens"]
        options |= {"S": longer * options["S"], "cu_seqlens": cu and [longer * bound for bound in cu]}
        first = options.pop("seed")
        for seed in range(first, first + inputs):
            found.append(compare(family, make(**options, seed=seed, dtype=dtype, device=DEVICE)))

    collect()
    check_pooled(found, dtype)


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 100.0])
def test_steps_of_any_size(family, scale):  # noqa: F811
    """dt from 5e-7 to 5: what a family keeps of it in fewer than 32 bits neither vanishes nor overflows."""
    x = make(S=48, N=32, P=32, dtype=torch.bfloat16, device=DEVICE)
    found = compare(family, replace(x, DT=x.DT * scale))
    bad = {n: e for n, e in {"out": found.out, **found.gradients}.items() if not e < 1e-2}  # one call, not pooled
    assert not bad, bad


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_mean_relative_error_against_small_operators_in_fp32(family, gate):  # noqa: F811
    """Ascend's rule for an operator without a GPU beside it: below 0.1 %, element by element."""
    x = make(2, 40, R=2, **gate, device=DEVICE)
    grad_out = torch.randn(x.V.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for name, ours, small in zip(
        GRADIENT_NAMES, family.backward(x, grad_out), reference.backward(x, grad_out), strict=True
    ):
        if small is not None:
            floor = 1e-4 * small.abs().max()  # below it an element is what larger terms leave
            assert ((ours - small).abs() / small.abs().clamp_min(floor)).mean() < 1e-3, name
