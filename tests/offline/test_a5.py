"""Kernels for Ascend 950: the operator's own, a fused one written by hand, and the tables."""

import pytest

from mindspeed_mamba3_plugin.offline import a5


@pytest.fixture(scope="module")
def found(in_ascend_environment):
    return in_ascend_environment("a5_process.py")


def test_fused_kernel_hands_over_on_the_chip(found):
    row = found["fused"]
    assert not row["error"]
    assert (row["to_ub"], row["split"], row["to_l1"], row["one_core"]) == (1, 1, 1, 0)
    assert row["used"] == {"ub": 20736, "cbuf": 65536, "cc": 24576}


def test_its_synchronisation_is_kept(found):
    """Every set has its wait, in the loop and at its ends, on both sides."""
    lines = [line.strip() for line in found["hivm"].splitlines() if "sync_block_" in line]
    for flag in (1, 2, 4, 6):
        own = [line for line in lines if line.endswith(f"flag = {flag}")]
        sets, waits = (sum(f"sync_block_{what}" in line for line in own) for what in ("set", "wait"))
        assert sets == waits > 0, flag


def test_without_its_request_one_vector_core_is_left_out(found):
    assert not found["guarded"]["error"] and found["guarded"]["one_core"] > 0


def test_kernels_of_the_operator_fit(found):
    assert found["_outer_kernel"]["error"] == found["_values_kernel"]["error"] == ""
    assert found["_outer_kernel"]["used"]["cc"] > 0 == found["_outer_kernel"]["used"]["ub"]
    assert found["_values_kernel"]["used"]["ub"] > 0 == found["_values_kernel"]["to_ub"]


def test_tables():
    rows = [
        a5.Row("N128_P64_R4_C16", "_products_kernel", "ub overflow, needs 638976 of 253952 bytes"),
        a5.Row("N16_P64_R4_C8", "_products_kernel", "", {"ub": 249856, "cbuf": 1, "cc": 2}, 14, 0, 12, 15),
        a5.Row("N16_P64_R4_C8", "_outer_kernel", "", {"ub": 0, "cbuf": 1, "cc": 4096}),
    ]
    text = a5.tables(rows, "1.2.0")
    assert "3 kernels at 2 shapes, 1 that do not fit" in text
    assert "| products | needs 638976 of UB | 249856 |" in text and "| outer |  | 4096 |" in text
    assert "| products: N16_P64_R4 | 14 | 0 | 12 | 15 |" in text
    assert a5._cell(a5.Row("", "k", "Assertion failed")) == "fails"
