#!/usr/bin/env bash
# The test suite in an environment of its own. Arguments go to pytest, e.g. launch/test.sh tests/unit -k config
# launch/test.sh gpu: the tests that need a GPU (skipped, with the reason, where there is none).
# launch/test.sh sglang: rollouts on the real SGLang, in an environment of their own (.venv-sglang).
here="$(dirname "${BASH_SOURCE[0]}")"
if [ "${1:-}" = sglang ]; then
    source "$here/sglang_environment.sh"
    shift
    exec "$PYTHON" -m pytest -q tests/sglang "$@"
fi
source "$here/environment.sh"
if [ "${1:-}" = gpu ]; then
    shift
    set -- tests/gpu -rs "$@"
fi
exec "$PYTHON" -m pytest -q "$@"
