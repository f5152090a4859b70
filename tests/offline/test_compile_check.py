"""The compile check finds every fault it promises to find, and only those."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

EXPECTED = {
    "scalar loop": "a scalar loop over 63 elements",
    "atomic": "1 atomics",
    "one vector core": "not split over both vector cores",
    "overflow": "ub overflow, needs 262144 of 196608 bytes",
    "fallback": "the compiler fell back: Ub overflow detected",
    "not a kernel": "Cannot broadcast",
    "more programs than cores": "4096 programs for 40 cores",
    "more programs than allowed": "less than 65536",
}


@pytest.fixture(scope="module")
def found(in_ascend_environment):
    return in_ascend_environment("faulty_kernels.py")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_planted_fault_is_found(found, name):
    assert found[name] and EXPECTED[name] in found[name][0], found[name]


def test_a_sound_kernel_has_no_fault(found):
    assert found["sound"] == []


def command(*arguments: str) -> subprocess.CompletedProcess:
    program = [sys.executable, str(ROOT / "scripts/check_ascend_compile.py"), *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=600)


def test_the_command_reports_and_writes(in_ascend_environment, tmp_path):
    document = tmp_path / "page.md"
    document.write_text("# Page\n")
    given = ("--shapes", "N16_P64_R4_C8", "--dtypes", "bf16", "--variants", "plain", "--compilers", "1.2.0")
    for _ in range(2):
        done = command(*given, "--write", str(document))
        assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS  all 20 kernels" in done.stdout.splitlines()[-1]
    page = document.read_text()
    assert page.startswith("# Page") and page.count("compile: begin") == 1
    assert "| products L0C |" in page


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--shapes", "N1"), "--shapes: invalid choice: 'N1'"),
        (("--compilers", "0.9.0"), "ascendnpu-ir 0.9.0 is not in this environment"),
        (("--jobs", "0"), "--jobs is 0, must be at least 1"),
        (("--calibrate", "x.json"), "--calibrate is given without --estimate"),
        (("--plain-port", "x.py"), "--plain-port is given without --estimate"),
        (("--estimate", "--plain-port", "none.py"), "--plain-port is none.py: no such file"),
        (
            ("--estimate", "--plain-port", str(ROOT / "tests/offline/conftest.py")),
            "it has no prepare, bwd_fwd, bwd_bwd",
        ),
        (("--estimate", "--variants", "norm"), "--variants is ['norm'], --estimate takes plain alone"),
        (("--estimate", "--calibrate", "none.json"), "none.json: No such file"),
    ],
)
def test_bad_arguments_are_refused(in_ascend_environment, arguments, message):
    done = command(*arguments)
    assert done.returncode == 2 and message in done.stderr


def test_the_estimate_and_its_calibration(in_ascend_environment, tmp_path):
    document, measured = tmp_path / "page.md", tmp_path / "measured.json"
    given = ("--estimate", "--shapes", "N16_P64_R4_C8")
    first = command(*given, "--write", str(document))
    assert first.returncode == 0, first.stdout + first.stderr
    assert "An estimate, not a measurement (bf16, ascendnpu-ir 1.2.0)" in document.read_text()
    assert "| bwd_bwd products | " in first.stdout and "of 2 reach" in first.stdout.splitlines()[-1]
    slow = {"scores": 50.0, "rotate_bwd": 50.0, "products": 50.0}  # ms
    measured.write_text(json.dumps({"shape": "N16_P64_R4_C8", "dtype": "bf16", "measured_ms": slow}))
    second = command(*given, "--calibrate", str(measured), "--json", str(tmp_path / "rows.json"))
    assert second.returncode == 0 and "Calibrated to times measured at N16_P64_R4_C8 bf16" in second.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["entry"] for row in rows] == ["bwd_fwd", "bwd_bwd"] and rows[1]["ms"]["A"] > 20  # not 3.5
