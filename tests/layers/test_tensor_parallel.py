from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_two_ranks_compute_what_one_does(tmp_path):
    script = Path(__file__).with_name("tensor_parallel_process.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        results = [p.communicate(timeout=180) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, (out, err) in zip(processes, results, strict=True):
        assert p.returncode == 0, out + err[-3000:]
