"""The acceptance rule and its table, on hand-made times."""

import pytest

from mindspeed_mamba3_plugin.offline import acceptance, cases
from mindspeed_mamba3_plugin.offline.report import acceptance_table

SHAPE = "N128_P64_R4_C16"  # A100: 2.323 and 3.935 ms; 910B3: 15.461 and 24.499 with the public Triton port


def test_required_shares_are_the_rules():
    # 0.7 times 910B2 over A100, as printed in the rule to one decimal.
    rates = {"cube": (354, 312), "vector": (11.06, 19.5), "memory": (1800, 2039)}
    for bound, (npu, gpu) in rates.items():
        assert acceptance.REQUIRED[bound] == pytest.approx(0.7 * npu / gpu, abs=0.051)
    assert acceptance.REQUIRED == {"memory": 0.6, "vector": 0.4, "cube": 0.8}


@pytest.mark.parametrize(("ms", "at_06", "at_08"), [(2.90, True, True), (2.91, True, False), (3.88, False, False)])
def test_met_or_not(ms, at_06, at_08):
    verdicts = [acceptance.judge(SHAPE, "bwd_fwd", ms, share) for share in (0.6, 0.8)]
    assert [v.met for v in verdicts] == [at_06, at_08]
    assert verdicts[0].ratio == pytest.approx(2.323 / ms)


def test_exactly_at_the_limit_is_met():
    limit = acceptance.judge(SHAPE, "bwd_bwd", 1.0, 0.6).limit_ms
    assert acceptance.judge(SHAPE, "bwd_bwd", limit, 0.6).met
    assert not acceptance.judge(SHAPE, "bwd_bwd", limit * 1.0001, 0.6).met


def test_the_public_record_does_not_meet_the_rule():
    """Nobody had met it: the published Triton and AscendC times, through the same rule."""
    for port in ("triton", "ascendc"):
        record = cases.official_times().items()
        times = {s: {e: r[f"{port}_910b3_{e}_ms"] for e in acceptance.ENTRIES} for s, r in record}
        assert acceptance.met(times, 0.6) == {"bwd_fwd": 0, "bwd_bwd": 0}
        assert len(times) == 11


def test_table():
    text = acceptance_table({SHAPE: {"bwd_fwd": 2.95, "bwd_bwd": 7.0}, "N16_P64_R4_C8": {"bwd_bwd": 2.0}})
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| bwd")}
    assert list(rows) == [f"bwd_fwd {SHAPE}", f"bwd_bwd {SHAPE}", "bwd_bwd N16_P64_R4_C8"]
    assert rows[f"bwd_fwd {SHAPE}"].count("met (") == 2 and "not met (2.90 ms)" in rows[f"bwd_fwd {SHAPE}"]
    assert "| 15.461 | 5.2x |" in rows[f"bwd_fwd {SHAPE}"]
    assert rows[f"bwd_bwd {SHAPE}"].count("not met") == 2
    assert rows["bwd_bwd N16_P64_R4_C8"].count("not met") == 0
    assert "bwd_fwd: of 1 shapes meet the rule 1 at 0.6, 0 at 0.8; geometric mean of A100 / ours 0.79." in text
    assert "bwd_bwd: of 2 shapes meet the rule 1 at 0.6, 1 at 0.8; geometric mean of A100 / ours 0.74." in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("N1_P1_R1_C1", "bwd_fwd", 1.0, 0.6), r"shape is 'N1_P1_R1_C1': must be one of N16_P64_R4_C8, "),
        ((SHAPE, "forward", 1.0, 0.6), r"entry is 'forward': must be one of bwd_fwd, bwd_bwd"),
        ((SHAPE, "bwd_fwd", 0.0, 0.6), r"is 0.0 ms: must be a positive number"),
        ((SHAPE, "bwd_fwd", float("inf"), 0.6), r"is inf ms: must be a positive number"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        acceptance.judge(*arguments)
