from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_ranks

pytest.importorskip("megatron.core", minversion="0.15", reason="layers of before take no process groups")


def test_two_ranks_compute_what_one_does(tmp_path):
    run_ranks(Path(__file__).with_name("tensor_parallel_process.py"), 2, str(tmp_path / "rendezvous"))
