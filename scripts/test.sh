#!/usr/bin/env bash
# Everything that is checked without a GPU or an NPU: style, the kernels through the Ascend compiler, all CPU tests.
# Arguments go to pytest. SKIP_ASCEND=1 leaves the compiler lane out.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh
source scripts/_ascend_env.sh
ensure_environment cpu,test || exit 2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES= ASCEND_RT_VISIBLE_DEVICES=

failed=()
echo "== style"
"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . || failed+=(style)

if [ -z "${SKIP_ASCEND:-}" ]; then
    echo "== kernels through the Ascend compiler"
    ensure_ascend_environment && "$ASCEND_PYTHON" scripts/check_ascend_compile.py --quick || failed+=("Ascend compiler")
fi

echo "== tests"
"$PYTHON" -m pytest tests "$@" || failed+=(tests)

if [ ${#failed[@]} -gt 0 ]; then
    (IFS=,; echo "FAIL  ${failed[*]}")
    exit 1
fi
