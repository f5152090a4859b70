"""The scripts beside the tests: upstream's file on our kernels, and the precision table."""

import sys

import precision_table
import pytest
import torch
import upstream_adapter
from cases import DEVICE, gradient_errors, make

from mindspeed_mamba3_plugin.ops import reference, upstream

FILE = """FIXED_B = 4
FIXED_S = 2048
FIXED_H = 16
REL_TOL = 0.10
skip = not torch.cuda.is_available()
t = dict(device="cuda")
"""


@pytest.fixture
def stand_ins():
    upstream_adapter.install()
    yield
    for name in [n for n in sys.modules if n.split(".")[0] in ("tilelang", "mamba_ssm")]:
        del sys.modules[name]


def test_the_adapter_changes_what_it_is_asked_to():
    assert upstream_adapter.adapted(FILE, None, False) == FILE
    assert "REL_TOL = 0.02\n" in upstream_adapter.adapted(FILE, 0.02, False)
    small = upstream_adapter.adapted(FILE, None, True)
    assert "cuda" not in small and "FIXED_S = 128\n" in small
    with pytest.raises(ValueError, match=r"0 lines that match .*REL_TOL"):
        upstream_adapter.adapted("", 0.02, False)


def test_the_stand_ins_are_our_functions(stand_ins):
    from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd
    from mamba_ssm.ops.triton.mamba3.mamba3_mimo_utils import compute_dacs_segsum_triton

    assert mamba3_mimo_bwd.mamba_mimo_bwd_bwd is upstream.mamba_mimo_bwd_bwd
    assert compute_dacs_segsum_triton is upstream.compute_dacs_segsum_triton


def test_upstreams_gradients_are_taken_through_the_angles(stand_ins):
    """With our functions in upstream's place the column of the table must show no error."""
    x = make(S=40, device=DEVICE)
    grad_out = torch.randn(1, 40, 2, 16, device=DEVICE)
    found = precision_table.upstream_gradients(x, grad_out)
    true = reference.backward(precision_table.doubled(x), grad_out.double())
    assert max(gradient_errors(found, true).values()) < 1e-4


SHAPE = "N16_P64_R4_C8"


def test_a_larger_error_than_tilelangs_is_named(tmp_path):
    errors = {SHAPE: {"triton-ascend": {"dq": 0.004, "dk": 0.003}, "tilelang": {"dq": 0.005, "dk": 0.002}}}
    assert precision_table.worse(errors) == [f"triton-ascend {SHAPE} dk: 3.00e-03, TileLang 0.002"]
    del errors[SHAPE]["tilelang"]  # then the recorded ones count
    assert precision_table.worse(errors) == []
    document = tmp_path / "kernels.md"
    document.write_text("# Kernels\n\nBefore.\n")
    for _ in range(2):
        precision_table.write(document, precision_table.section({"where": "here", "errors": errors}))
    text = document.read_text()
    assert text.startswith("# Kernels\n\nBefore.\n") and text.count("| dq | 0.40 / 0.70 |") == 1
    assert "nowhere worse" in text
