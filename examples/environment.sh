# Sourced by the scripts of this project: makes or reuses .venv and sets PYTHON.
#
# torch is pinned by constraints.txt. The package index's Linux build of it carries CUDA, so a host
# with an NVIDIA GPU uses the GPU without further flags.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3.11 python3.12 python3 python; do
        if command -v "$candidate" >/dev/null \
            && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
                2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python of 3.11 or newer with venv was found; install python3.11 and python3.11-venv"
}

# The environment is whole when it was installed for exactly these files.
wanted_state() {
    cat "$ROOT/setup.py" "$ROOT/constraints.txt" | cksum
}

prepare_environment() {
    local state="$VENV/.megatron_attnres"
    if [[ -x "$PYTHON" && "$(cat "$state" 2>/dev/null)" == "$(wanted_state)" ]]; then
        return
    fi
    command -v c++ >/dev/null || command -v g++ >/dev/null \
        || fail "no C++ compiler was found; install g++"
    if [[ ! -x "$PYTHON" ]]; then
        local base
        base="$(find_python)" || exit 1
        echo "making $VENV with $base"
        "$base" -m venv "$VENV" || fail "could not make $VENV"
    fi
    echo "installing into $VENV (once; a few minutes)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check \
        --constraint "$ROOT/constraints.txt" --editable "${ROOT}[test]" \
        || fail "installation failed; run the script again to go on where it stopped"
    wanted_state >"$state"
}

prepare_environment
