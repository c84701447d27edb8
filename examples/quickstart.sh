#!/usr/bin/env bash
# Trains a small GPT with Block Attention Residuals on real text, on 4 ranks of this machine:
# 2 pipeline stages x 2 virtual stages, 2 data-parallel replicas, ZeRO-1. About 5 minutes on 2 cores.
#
# The corpus is the standard library of the running Python. Results: runs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$ROOT/examples/library.sh"
cd "$ROOT"

RUN=runs/quickstart
prepare_library "$RUN" 4096

"$PYTHON" pretrain_attnres.py --config examples/quickstart.yaml \
    --summary-file "$RUN/summary.json" "$@"
