#!/usr/bin/env bash
# Makes .venv ready to run dualflow: scripts/setup.sh EXTRAS, such as "plot,train".
# Safe to repeat: what is installed already stays. PYTHON=/path/to/python3.12 chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=$1
venv=.venv
pins=requirements/pinned.txt

usable() { # a Python that torch has wheels for, and that can make virtual environments
    "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
        >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "setup: no usable Python among: ${PYTHON:-python3, python3.11 to python3.14, python}." >&2
    echo "setup: install Python 3.11 to 3.14 with its venv module (on Debian and Ubuntu:" >&2
    echo "setup: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python ..." >&2
    return 1
}

# An environment whose Python is gone, or that was made in another folder, cannot be mended.
if [ -e "$venv" ]; then
    made_in=$(cat "$venv/.made-in" 2>/dev/null || pwd)
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 || [ "$made_in" != "$(pwd)" ]; then
        echo "setup: $venv was made for another place or Python; making it anew"
        rm -rf "$venv"
    fi
fi
if [ ! -e "$venv" ]; then
    python=$(find_python)
    echo "setup: making $venv with $("$python" --version) ($python)"
    "$python" -m venv "$venv"
fi
pwd >"$venv/.made-in"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
# torch comes first and by its pin, so that no other package can choose a torch of its own.
echo "setup: installing $(grep '^torch==' $pins) (the largest download)"
pip install --quiet --constraint $pins setuptools "$(grep '^torch==' $pins)"
echo "setup: installing dualflow[$extras] at the versions of $pins"
pip install --quiet --constraint $pins --no-build-isolation --editable ".[$extras]"
if [[ ",$extras," == *,dev,* ]]; then
    pip install --quiet --constraint $pins --no-deps --requirement requirements/lm_eval.txt
fi
echo "setup: $venv is ready"
