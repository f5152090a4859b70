#!/usr/bin/env bash
# Plants an error in the operator, one at a time, and says whether the tests notice. A few minutes; needs no GPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh
ensure_environment cpu,test
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
exec "$PYTHON" tests/ops/mutation_check.py "$@"
