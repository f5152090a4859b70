"""`python -m mindspeed_mamba3_plugin doctor`."""

from __future__ import annotations

import json
import sys

import pytest

from mindspeed_mamba3_plugin import __main__ as cli

pytest.importorskip("megatron.core")


def doctor(capsys, *flags: str) -> tuple[int, str]:
    status = cli.main(["doctor", *flags])
    return status, capsys.readouterr().out


def test_a_usable_environment(capsys):
    status, out = doctor(capsys, "--json")
    found = json.loads(out)
    assert status == 0
    assert found["problems"] == []
    assert found["versions"]["megatron-core"].startswith("0.")
    assert found["kernels"]["reference"]["runs"] == "reference"
    assert [p["state"] for p in found["patches"]][:3] == ["would apply"] * 3

    status, screen = doctor(capsys)
    assert status == 0
    assert screen.rstrip().endswith("usable")
    assert len(screen.splitlines()) <= 40, "one screen"
    assert all(name in screen for name in [*found["versions"], *found["kernels"]])
    assert all(p["target"] in screen for p in found["patches"])


def test_versions_are_those_of_the_code_that_runs(monkeypatch, stub):
    """Megatron-LM and MindSpeed are mostly run from a source tree."""
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.15.2")
    stub("mindspeed")
    versions = cli.examine()["versions"]
    assert (versions["megatron-core"], versions["mindspeed"]) == ("0.15.2", "a source tree")


def test_a_kernel_that_cannot_run_says_why(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    row = cli.examine_kernels("cpu")["triton"]
    assert row["runs"] is None
    assert "TRITON_INTERPRET=1" in row["why_not"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.examine_kernels("cpu")["triton"] == {"runs": "triton-ascend", "why_not": None}


def test_a_refused_patch_is_a_problem(capsys, monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.99")
    status, out = doctor(capsys)
    assert status == 1
    assert "PROBLEM: patch megatron.core" in out
    assert "megatron-core 0.99" in out
    assert "usable" not in out


@pytest.mark.parametrize(
    ("versions", "device", "said"),
    [
        ({"triton": "3.2.0", "triton-ascend": "3.2.1"}, "npu", ["3.2.0", "3.2.1", "uninstall both"]),
        ({}, "npu", ["triton-ascend is not installed"]),
        ({"torch": None}, "cpu", ["torch is not installed"]),
    ],
)
def test_package_problems_name_versions_and_the_remedy(versions, device, said):
    full = {"torch": "2.9", "triton": None, "triton-ascend": None, **versions}
    (problem,) = cli.package_problems(full, device)
    assert all(word in problem for word in said)
    assert cli.package_problems({"torch": "2.9", "triton": "3.2", "triton-ascend": None}, "cuda") == []


def test_wrong_usage_exits_2(capsys):
    for argv in ([], ["launch-nothing"], ["doctor", "--yaml"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_an_unusable_stack_is_named_with_the_remedy(stub, monkeypatch):
    assert cli.stack_problems("cpu") == []
    for name in cli._CANN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    stub("torch_npu")
    (problem,) = cli.stack_problems("cpu")
    assert "torch_npu" in problem and "source its set_env.sh" in problem
    assert cli.stack_problems("npu") == []
    monkeypatch.setenv("ASCEND_HOME_PATH", "/somewhere")
    assert cli.stack_problems("cpu") == []
    stub("mindspeed.megatron_adaptor")
    (problem,) = cli.stack_problems("npu")
    assert "imported before" in problem and "register()" in problem
    monkeypatch.delitem(sys.modules, "mindspeed.megatron_adaptor")
    stub("megatron_adaptor")
    (problem,) = cli.stack_problems("npu")
    assert "MegatronAdaptor" in problem and "core_r0.16.0" in problem
