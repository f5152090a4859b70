#!/usr/bin/env bash
# The plugin with every supported megatron-core, without a GPU or an NPU: tests of patches and layers, and ten steps of
# training, in an environment per version.
#   scripts/test_matrix.sh [VERSION ...]      default: all of them
# Environments are kept in .matrix/ (or MATRIX=folder): one of everything else per Python, one folder per megatron-core.
# PYTHON3_11 and PYTHON3_12 name the interpreters (python3.11, python3.12); 0.17 and later need Python 3.12.
# MATRIX_PYTHON names one that has the extras cpu and test already, and is used as it is.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MATRIX=${MATRIX:-$PWD/.matrix}
ALL=(0.12.1 0.15.3 0.16.1 0.17.1 0.18.2 0.19.0)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES= ASCEND_RT_VISIBLE_DEVICES= TRITON_INTERPRET=1
export PIP_DISABLE_PIP_VERSION_CHECK=1
# 0.15 compiles for the GPU that it finds when imported, and cannot be imported where a CUDA build of torch finds none.
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}

prepare() { # version: sets PY and CORE
    local series=3.11 name base
    case $1 in 0.1[7-9].*) series=3.12 ;; esac
    name=PYTHON${series/./_}
    base=${!name:-python$series}
    PY=${MATRIX_PYTHON:-$MATRIX/py$series/bin/python} CORE=$MATRIX/core-$1
    if [ -z "${MATRIX_PYTHON:-}" ] && [ ! -f "$MATRIX/py$series/ready" ]; then
        "$base" -c 'import ensurepip, venv' 2> /dev/null || {
            echo "megatron-core $1 needs Python $series with its venv package, and '$base' does not run as one: install it, or name" \
                "another with $name=/path/to/python" >&2
            return 1
        }
        "$base" -m venv "$MATRIX/py$series" || return
        # The CPU build where it is offered: left to itself pip takes the one for CUDA, several GB.
        "$PY" -m pip install --quiet 'torch==2.13.0+cpu' 2> /dev/null || "$PY" -m pip install --quiet 'torch==2.13.0' || return
        "$PY" -m pip install --quiet 'triton>=3.2' einops psutil pybind11 matplotlib tensorboard tqdm six regex && \
            "$PY" -m pip install --quiet --editable '.[test]' || return
        touch "$MATRIX/py$series/ready"
    fi
    [ -d "$CORE/megatron" ] || "$PY" -m pip install --quiet --no-deps --target "$CORE" "megatron-core==$1"
}

failed=()
for version in "${@:-${ALL[@]}}"; do
    echo "== megatron-core $version"
    prepare "$version" || { failed+=("$version: no environment"); continue; }
    run=$(mktemp -d)
    PYTHONPATH=$CORE "$PY" -W ignore -m pytest -q -p no:warnings tests/patches tests/layers || failed+=("$version: tests")
    PYTHONPATH=$CORE "$PY" -W ignore scripts/train.py --config configs/smoke_cpu.yaml --set training.steps=10 \
        --set mamba3.mamba3_backward_kernel=reference --out "$run" || failed+=("$version: training")
    rm -r "$run"
done

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAIL  %s\n' "${failed[@]}"
    exit 1
fi
echo "every version passes"
