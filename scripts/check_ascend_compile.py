#!/usr/bin/env python3
"""Compile every kernel of the operator for Ascend 910B without a chip, and judge it; see --help.

Runs in an environment of its own, .venv-ascend in the checkout, which it makes when it is not there.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-ascend/bin/python"

if Path(sys.prefix).resolve() != ROOT / ".venv-ascend":
    setup = "set -e; . scripts/_ascend_env.sh; ensure_ascend_environment 1.2.0 1.1.0"
    if subprocess.run(["bash", "-c", setup], cwd=ROOT).returncode:
        sys.exit(2)
    os.environ.pop("TRITON_INTERPRET", None)
    os.execv(PYTHON, [str(PYTHON), *sys.argv])

sys.path.insert(0, str(ROOT))
from mindspeed_mamba3_plugin.offline.command import main  # noqa: E402

sys.exit(main())
