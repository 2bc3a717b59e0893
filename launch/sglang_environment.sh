# Sourced: launch/environment.sh, then SGLang on top, in an environment of its own (SGLANG_VENV, default
# .venv-sglang). Where there is no GPU, PYTHONPATH gets the stand-ins for what has no CPU build.
VENV="${SGLANG_VENV:-.venv-sglang}"
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
stamp="$VENV/.sglang-$(cat requirements*.txt pyproject.toml | cksum | cut -d' ' -f1)"
if [ ! -e "$stamp" ]; then
    if [ "$requirements" = requirements.txt ]; then
        echo "== installing SGLang for the CPU into $VENV (about 3 minutes)"
        "$VENV/bin/pip" install --quiet --no-deps -r requirements-sglang-cpu.txt
    else
        "$VENV/bin/pip" install --quiet -r requirements-sglang-gpu.txt
    fi
    # The package itself, for the entry point through which SGLang's processes find our plugin.
    "$VENV/bin/pip" install --quiet setuptools wheel
    "$VENV/bin/pip" install --quiet --no-deps --no-build-isolation --editable .
    touch "$stamp"
fi
stand_ins="$("$PYTHON" tests/support/stand_ins.py)"
export PYTHONPATH="${stand_ins:+$stand_ins:}$PYTHONPATH"
