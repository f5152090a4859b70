# Sourced by the other scripts: a Python environment with the plugin and the given extras in it.
#   ensure_environment cpu,test     sets PYTHON; installs only what is missing or has changed
# An active virtual environment is used as it is; otherwise .venv in the checkout is made and used.
# TORCH=... asks for another torch than the CPU build below, for example TORCH='torch>=2.6'.

ensure_environment() {
    local extras=$1 root=$PWD venv=${VIRTUAL_ENV:-$PWD/.venv} base
    if [ ! -x "$venv/bin/python" ]; then
        base=$(_base_python) || { echo "FAIL  no Python 3.10, 3.11 or 3.12 found; name one with PYTHON=..." >&2; return 2; }
        echo "making $venv with $("$base" --version)"
        "$base" -m venv "$venv" || { echo "FAIL  $base cannot make virtual environments (is its venv package installed?)" >&2; return 2; }
    fi
    PYTHON=$venv/bin/python

    local stamp=$venv/.mindspeed_mamba3_plugin-${extras//,/-} wanted
    wanted="$root $(cksum < setup.cfg) ${TORCH:-}"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "installing mindspeed_mamba3_plugin[$extras] into $venv (minutes the first time)"
        _install "$extras" || { echo "FAIL  installation of mindspeed_mamba3_plugin[$extras] failed, see above" >&2; return 2; }
        echo "$wanted" > "$stamp"
    fi
}

_base_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

_install() {
    local pip=("$PYTHON" -m pip --disable-pip-version-check install)
    [ -t 1 ] || pip+=(--quiet)
    # torch first: left to the other packages, pip takes the newest build for CUDA, several GB, also where there is no GPU.
    if [ -n "${TORCH:-}" ]; then
        "${pip[@]}" "$TORCH" || return
    elif ! "$PYTHON" -c 'import torch' 2> /dev/null; then
        "${pip[@]}" 'torch==2.13.0+cpu' 2> /dev/null || "${pip[@]}" 'torch==2.13.0' || return
    fi
    "${pip[@]}" --editable ".[$1]"
}
