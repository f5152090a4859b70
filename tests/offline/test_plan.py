"""The plan for an NPU: what it takes compiles, what does not fit is refused before any launch, with the sizes."""

import pytest
import torch

from mindspeed_mamba3_plugin.ops.triton.plan import plain_plan

SIZES = ["512,64,4,bf16", "256,128,4,fp32", "48,96,3,fp32", "16,16,16,bf16", "64,256,1,fp32"]


def test_what_is_planned_compiles(in_ascend_environment):
    found = in_ascend_environment("plans_process.py", *SIZES)
    assert list(found) == SIZES and not any(found.values()), found


@pytest.mark.parametrize(
    "N, P, R, dtype", [(256, 256, 1, torch.bfloat16), (128, 64, 32, torch.bfloat16), (512, 128, 4, torch.float32)]
)
def test_what_does_not_fit_is_refused_with_the_sizes(N, P, R, dtype):
    with pytest.raises(
        ValueError, match=rf"N = {N}, P = {P}, R = {R}, operands in {dtype}.* bytes of L0C and \d+ of L1"
    ):
        plain_plan(N, P, R, dtype, "npu")
