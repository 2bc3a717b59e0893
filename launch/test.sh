#!/usr/bin/env bash
# The test suite in an environment of its own. Arguments go to pytest, e.g. launch/test.sh tests/unit -k config
# launch/test.sh gpu: the tests that need a GPU (skipped, with the reason, where there is none).
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ "${1:-}" = gpu ]; then
    shift
    set -- tests/gpu -rs "$@"
fi
exec "$PYTHON" -m pytest -q "$@"
