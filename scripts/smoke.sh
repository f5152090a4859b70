#!/usr/bin/env bash
# Train a small hybrid model in megatron-core twice, on the reference backward and on the Triton backward (in Triton's
# interpreter, on a CPU), and say whether the loss curves agree. Arguments go to compare_loss_curves.py (--fresh, ...).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh
ensure_environment cpu
export CUDA_VISIBLE_DEVICES= ASCEND_RT_VISIBLE_DEVICES=
exec "$PYTHON" scripts/compare_loss_curves.py --config configs/smoke_cpu.yaml --out runs/smoke "$@"
