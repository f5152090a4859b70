"""The Ascend toolchain lives in an environment of its own; tests run their Ascend part there, as a process."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-ascend/bin/python"


@pytest.fixture(scope="session")
def in_ascend_environment():
    """Runs a file of this folder there with arguments; returns what it prints last, as JSON."""
    if not PYTHON.exists():
        pytest.skip("no .venv-ascend here: scripts/check_ascend_compile.py makes it")

    def run(file: str, *arguments: str):
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests/ops")])
        command = [str(PYTHON), str(Path(__file__).parent / file), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
