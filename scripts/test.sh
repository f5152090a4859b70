#!/usr/bin/env bash
# Everything that is checked without a GPU or an NPU: style, the kernels through the Ascend compiler, all CPU tests.
# Arguments go to pytest. SKIP_ASCEND=1 leaves the compiler lane out. JOBS is the number of processes (default: a core each, at most 8).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/_env.sh
ensure_environment cpu,test || exit 2
cores=$(env -u OMP_NUM_THREADS nproc)  # it would answer with OMP_NUM_THREADS
JOBS=${JOBS:-$((cores < 8 ? cores : 8))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES= ASCEND_RT_VISIBLE_DEVICES=

failed=()
echo "== style"
"$PYTHON" -m ruff check . && "$PYTHON" -m ruff format --check . || failed+=(style)

if [ -z "${SKIP_ASCEND:-}" ]; then
    echo "== kernels through the Ascend compiler"
    PYTHON=$PYTHON "$PYTHON" scripts/check_ascend_compile.py --jobs "$JOBS" || failed+=("Ascend compiler")
fi

echo "== tests"
"$PYTHON" -m pytest tests --numprocesses "$JOBS" --dist worksteal "$@" || failed+=(tests)

if [ ${#failed[@]} -gt 0 ]; then
    (IFS=,; echo "FAIL  ${failed[*]}")
    exit 1
fi
