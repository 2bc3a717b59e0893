# Sourced by quickstart.sh and test.sh: makes the virtual environment once and sets PYTHON.
# VENV names its folder (default .venv); PYTHON_BASE the interpreter it is made from (default python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV="${VENV:-.venv}"
requirements=requirements.txt
index=(--extra-index-url https://download.pytorch.org/whl/cpu)
if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
    requirements=requirements-gpu.txt
    index=()
fi

# The stamp is written last, so an installation that was interrupted is done again.
stamp="$VENV/.installed-$(cat requirements.txt requirements-gpu.txt | cksum | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
    echo "== installing $requirements into $VENV (about 3 minutes)"
    "${PYTHON_BASE:-python3}" -m venv "$VENV"
    # Torch first, by itself: where the CPU index is out of reach, PyPI's build of the same version is taken.
    "$VENV/bin/pip" install --quiet --retries 1 "${index[@]}" "$(grep '^torch==' requirements.txt)"
    "$VENV/bin/pip" install --quiet -r requirements.txt
    if [ "$requirements" = requirements-gpu.txt ]; then
        echo "== compiling Transformer Engine's torch extension (about 25 minutes)"
        cuda=$("$VENV/bin/python" -c 'import torch; print(torch.version.cuda)')
        "$VENV/bin/pip" install --quiet setuptools wheel ninja pybind11 "nvidia-cuda-crt==$cuda.*" \
            "nvidia-cuda-cccl==$cuda.*" "nvidia-cuda-nvcc==$cuda.*" "nvidia-cuda-profiler-api==$cuda.*"
        nvidia=$("$VENV/bin/python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
        toolkit="$nvidia/cu${cuda%%.*}"
        CUDA_HOME="${CUDA_HOME:-$toolkit}" NVTE_FRAMEWORK=pytorch \
            CPATH="$toolkit/include/cccl:$(printf '%s:' "$nvidia"/*/include)${CPATH:-}" \
            LIBRARY_PATH="$(printf '%s:' "$nvidia"/*/lib)${LIBRARY_PATH:-}" \
            "$VENV/bin/pip" install --quiet --no-build-isolation -r requirements-gpu.txt
    fi
    touch "$stamp"
fi
PYTHON="$VENV/bin/python"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
