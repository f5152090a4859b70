#!/usr/bin/env bash
# The first hour with an Ascend 910B, in an environment that has everything: installs nothing, checks, tests and times
# the operator, trains the smoke comparison, and leaves one folder to send back. --dry-run tries it out on a CPU; --help.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
command -v "$PYTHON" > /dev/null || { echo "FAIL  no $PYTHON here: name the one that has torch_npu with PYTHON=..." >&2; exit 2; }
# A torch_npu that cannot be loaded would stop "import torch", before it could be said why.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
exec "$PYTHON" scripts/npu_acceptance.py "$@"
