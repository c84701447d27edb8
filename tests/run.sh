#!/usr/bin/env bash
# Sets everything up and runs lint and tests. Arguments go to pytest: bash tests/run.sh tests/model
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../examples/environment.sh"
cd "$ROOT"

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check --quiet .
exec "$PYTHON" -m pytest --quiet "$@"
