"""What an NPU would be given computes the right numbers: the lowered IR of every kernel, run on the CPU."""

import json
import re
from pathlib import Path

import pytest

from mindspeed_mamba3_plugin.offline import native
from mindspeed_mamba3_plugin.ops.triton import ascend

# A perfect result rounded once to bf16 is about 1.1e-3 away; a gradient is a chain of products of rounded operands.
BOUND = {"bfloat16": 6e-3, "float32": 1e-5}

CASES = {
    "bf16, rank 4": {"dtype": "bfloat16", "S": 72, "R": 4, "N": 32, "P": 32},
    "bf16, norm": {"dtype": "bfloat16", "S": 150, "H": 1, "R": 4, "N": 64, "P": 64, "norm": True, "seed": 3},
    "bf16, no reduction": {"dtype": "bfloat16", "S": 70, "R": 1, "N": 32, "P": 32, "reduce": False},
    "fp32, packed, odd sizes": {
        "dtype": "float32", "S": 60, "H": 4, "G": 2, "R": 3, "N": 20, "P": 10, "norm": True,
        "cu_seqlens": [0, 17, 17, 60],
    },
    "fp32, nothing optional": {"dtype": "float32", "S": 40, "R": 2, "z": False, "d": False, "reduce": False},
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_lowered_kernels_against_the_reference(in_ascend_environment, options):
    if why := native.missing():
        pytest.skip(why)
    result = in_ascend_environment("native_process.py", json.dumps(options))
    bad = {n: e for n, e in result["errors"].items() if not e < BOUND[options["dtype"]]}
    assert not bad, bad
    folder = Path(ascend.__file__).parent
    kernels = {name for f in folder.glob("*.py") for name in re.findall(r"^def (_\w+_kernel)\(", f.read_text(), re.M)}
    # Rank 1 has kernels of its own for what all others mix by.
    others, rank_one = {"_decay_kernel", "_mix_kernel", "_mix_bwd_kernel"}, {"_carries_kernel", "_mix_one_kernel"}
    assert set(result["ran"]) == kernels - (others if options["R"] == 1 else rank_one)
