"""Runs a script as the ranks of one small world."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_ranks(script: Path, world: int, *arguments: str, timeout: float = 600) -> None:
    """`script RANK *arguments` for each rank at once; fails with what the first failing rank printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "LOCAL_RANK": str(rank)},
        )
        for rank in range(world)
    ]
    try:
        results = [p.communicate(timeout=timeout) for p in processes]
    finally:
        for p in processes:
            p.kill()
    for p, (out, err) in zip(processes, results, strict=True):
        assert p.returncode == 0, out[-6000:] + err[-3000:]
