# Sourced by the other scripts: an environment of its own for the Ascend compiler, which needs no NPU and no CANN.
#   ensure_ascend_environment [VERSION...]    sets ASCEND_PYTHON; installs only what is missing
# Each VERSION of the ascendnpu-ir compiler is unpacked beside the others; without one, ASCENDNPU_IR_VERSION is.

ASCENDNPU_IR_VERSION=1.2.0
TRITON_ASCEND_VERSION=3.2.0

ensure_ascend_environment() {
    local venv=$PWD/.venv-ascend base version
    ASCEND_PYTHON=$venv/bin/python
    if [ ! -f "$venv/.triton-ascend-$TRITON_ASCEND_VERSION" ]; then
        base=$(_ascend_base_python) || { echo "FAIL  triton-ascend $TRITON_ASCEND_VERSION needs Python 3.10 or 3.11; name one with PYTHON=..." >&2; return 2; }
        echo "making $venv with $("$base" --version)"
        rm -rf "$venv"
        "$base" -m venv "$venv" || { echo "FAIL  $base cannot make virtual environments (is its venv package installed?)" >&2; return 2; }
        # torch first and for the CPU alone; triton-ascend names no requirements of its own.
        { _ascend_pip 'torch==2.13.0+cpu' 2> /dev/null || _ascend_pip 'torch==2.13.0'; } &&
            _ascend_pip numpy pybind11 pytest PyYAML packaging &&
            _ascend_pip --no-deps "triton-ascend==$TRITON_ASCEND_VERSION" ||
            { echo "FAIL  installation of triton-ascend $TRITON_ASCEND_VERSION failed, see above" >&2; return 2; }
        touch "$venv/.triton-ascend-$TRITON_ASCEND_VERSION"
    fi
    for version in "${@:-$ASCENDNPU_IR_VERSION}"; do
        [ -d "$venv/ascendnpu-ir/$version" ] && continue
        echo "installing ascendnpu-ir $version into $venv"
        rm -rf "$venv/ascendnpu-ir/.$version"
        _ascend_pip --no-deps --target "$venv/ascendnpu-ir/.$version" "ascendnpu-ir==$version" ||
            { echo "FAIL  installation of ascendnpu-ir $version failed, see above" >&2; return 2; }
        mv "$venv/ascendnpu-ir/.$version" "$venv/ascendnpu-ir/$version"
    done
}

_ascend_base_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

_ascend_pip() {
    "$ASCEND_PYTHON" -m pip --disable-pip-version-check install --quiet "$@"
}
