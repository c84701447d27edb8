#!/usr/bin/env bash
# Tokenizer and data of the laptop grids: the standard library of the running Python, 2,048 pieces.
# Results: runs/laptop. About a minute; does nothing where they are there already.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
source "$ROOT/examples/library.sh"
cd "$ROOT"

prepare_library runs/laptop 2048
