"""Kernels for Ascend 950: the operator's own, a fused one written by hand, and the tables."""

import pytest

from mindspeed_mamba3_plugin.offline import a5


@pytest.fixture(scope="module")
def found(in_ascend_environment):
    return in_ascend_environment("a5_process.py")


@pytest.mark.parametrize(("stage", "tiles"), [("outputs", 1), ("products", 2)])
def test_fused_kernels_hand_over_on_the_chip(found, stage, tiles):
    """At every shape: results go to UB, half of their rows to each core, and as many operands come from there."""
    assert len(found["fused"][stage]) == 5
    for shape, row in found["fused"][stage].items():
        assert not row["error"], shape
        assert (row["to_ub"], row["split"], row["to_l1"], row["one_core"]) == (tiles, tiles, tiles, 0), shape
        assert all(0 < used <= a5.ON_CHIP[memory] for memory, used in row["used"].items()), shape


def test_its_synchronisation_is_kept(found):
    """Every set has its wait, in the loop and at its ends, on both sides."""
    lines = [line.strip() for line in found["hivm"].splitlines() if "sync_block_" in line]
    for flag in (1, 2, 4, 6):
        own = [line for line in lines if line.endswith(f"flag = {flag}")]
        sets, waits = (sum(f"sync_block_{what}" in line for line in own) for what in ("set", "wait"))
        assert sets == waits > 0, flag


def test_sums_over_the_ranks_stay_on_the_chip(found):
    """dk and dv are multiplied onto in L0C inside the loop over ranks, and leave it once."""
    cube = found["hivm"].split("_mix_aiv(")[0].split("scf.for")  # tasks, then ranks
    inside, behind = cube[-1].split("sync_block_set[<CUBE>, <PIPE_M>, <PIPE_MTE3>]")
    assert inside.count("mmadL1 {a_transpose") == 2 and behind.count("hivm.hir.fixpipe") == 2


def test_without_its_request_one_vector_core_is_left_out(found):
    assert not found["guarded"]["error"] and found["guarded"]["one_core"] > 0


def test_kernels_of_the_operator_fit(found):
    scores, values = found["plain"]["_scores_kernel"], found["plain"]["_values_kernel"]
    assert scores["error"] == values["error"] == ""
    assert scores["used"]["cc"] > 0 == values["used"]["cc"]
    assert values["used"]["ub"] > 0 == values["to_ub"]


def test_tables():
    rows = [
        a5.Row("N128_P64_R4_C16", "_products_kernel", "ub overflow, needs 638976 of 253952 bytes"),
        a5.Row("N16_P64_R4_C8", "_products_kernel", "", {"ub": 249856, "cbuf": 1, "cc": 2}, 14, 0, 12, 15),
        a5.Row("N16_P64_R4_C8", "_scores_kernel", "", {"ub": 0, "cbuf": 1, "cc": 4096}),
    ]
    text = a5.tables(rows, "1.2.0")
    assert "3 kernels at 2 shapes, 1 that do not fit" in text
    assert "| products | needs 638976 of UB | 249856 |" in text and "| scores |  | 4096 |" in text
    assert "| products: N16_P64_R4 | 14 | 0 | 12 | 15 |" in text
    assert a5._cell(a5.Row("", "k", "Assertion failed")) == "fails"
