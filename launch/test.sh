#!/usr/bin/env bash
# The test suite in an environment of its own. Arguments go to pytest, e.g. launch/test.sh tests/unit -k config
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$PYTHON" -m pytest -q "$@"
