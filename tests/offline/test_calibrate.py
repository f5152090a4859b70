"""Measured times give the constants back that made them; a file that says something else is refused."""

import json

import pytest

from mindspeed_mamba3_plugin.offline.calibrate import GROUPS, calibrated, fit, read, scaled
from mindspeed_mamba3_plugin.offline.cost import FITS, Work, estimate

# One stage bound by each of the groups, of the sizes of real ones.
WORKS = {
    "scores": Work(cube_cycles=52000, cube_calls=615, memory_bytes=336e6),
    "rotate_bwd": Work(vector_calls=12900, vector_cycles=550000, transfers=8400, loaded_long=2e7, memory_bytes=1.0e9),
    "products": Work(
        mixed=True, cube_cycles=580000, cube_calls=9020, vector_calls=7000, vector_cycles=90000, transfers=9000,
        loaded_long=1.2e7, memory_bytes=3.5e9, workspace_bytes=1.9e9,
    ),
}  # fmt: skip
SHAPE = {"shape": "N128_P64_R4_C16", "dtype": "bf16"}


def written(tmp_path, content):
    path = tmp_path / "measured.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("truth", [(1.0, 1.0, 1.0), (1.3, 0.7, 2.0), (0.8, 2.5, 0.5), (2.0, 1.5, 4.0)])
def test_times_made_with_other_constants_give_them_back(name, truth):
    made_with = scaled(FITS[name], dict(zip(GROUPS, truth, strict=True)))
    ms = {stage: estimate(work, made_with).ns / 1e6 for stage, work in WORKS.items()}
    found = fit(WORKS, ms, FITS[name])
    again = scaled(FITS[name], found)
    assert {s: estimate(w, again).ns / 1e6 for s, w in WORKS.items()} == pytest.approx(ms, rel=0.01)
    assert tuple(found.values()) == pytest.approx(truth, rel=0.03)


def test_the_whole_way_from_a_file(tmp_path):
    slow = {n: scaled(c, {"memory": 1.5, "vector": 1.5, "mixed": 1.5}) for n, c in FITS.items()}
    ms = {stage: estimate(work, slow["A"]).ns / 1e6 for stage, work in WORKS.items()}
    measured = read(written(tmp_path, {**SHAPE, "measured_ms": ms}))
    fits, scales = calibrated(WORKS, measured)
    assert list(fits) == list(FITS) and scales["A"] == pytest.approx(dict.fromkeys(GROUPS, 1.5), rel=0.03)
    assert fits["A"].hbm == pytest.approx(slow["A"].hbm, rel=0.03)


def test_a_stage_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="names inner, the stages are products, rotate_bwd, scores"):
        fit(WORKS, {"inner": 1.0, "scores": 1.0, "products": 1.0}, FITS["A"])


TIMES = {"scores": 0.3, "rotate_bwd": 1.0, "products": 2.0}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "not JSON"),
        ([1], "has list, must be an object with"),
        ({"shape": "N1"}, r"has \['shape'\], must be an object with \['dtype', 'measured_ms', 'shape'\]"),
        ({**SHAPE, "shape": "N1", "measured_ms": TIMES}, "shape is 'N1', allowed are N16_P64_R4_C8"),
        ({**SHAPE, "dtype": "int8", "measured_ms": TIMES}, "dtype is 'int8', allowed are bf16, fp16, fp32"),
        ({**SHAPE, "measured_ms": {"scores": 1.0}}, "must name the ms of at least 3 stages, such as scores"),
        ({**SHAPE, "measured_ms": {**TIMES, "scores": -1}}, "measured_ms of scores is -1, must be a positive number"),
        ({**SHAPE, "measured_ms": {**TIMES, "scores": True}}, "measured_ms of scores is True"),
        ('{"shape": "N16_P64_R4_C8", "dtype": "bf16", "measured_ms": {"a": NaN, "b": 1, "c": 1}}', "of a is nan"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        read(written(tmp_path, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.json: No such file"):
        read(tmp_path / "nowhere.json")
