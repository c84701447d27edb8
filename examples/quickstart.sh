#!/usr/bin/env bash
# Trains a small GPT with Block Attention Residuals on real text, on 4 ranks of this machine:
# 2 pipeline stages x 2 virtual stages, 2 data-parallel replicas, ZeRO-1. About 5 minutes on 2 cores.
#
# The corpus is the standard library of the running Python. Results: runs/quickstart.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"

RUN=runs/quickstart
LIBRARY="$("$PYTHON" -c 'from megatron_attnres.data.corpora import standard_library_folder as find
print(find())')"
mkdir -p "$RUN"

if [[ ! -f "$RUN/tokenizer.model" ]]; then
    "$PYTHON" tools/train_tokenizer.py --input "$LIBRARY" --exclude site-packages '*.txt' \
        --vocab-size 4096 --output "$RUN/tokenizer.model"
fi
if [[ ! -f "$RUN/library_text_document.idx" ]]; then
    "$PYTHON" tools/preprocess_data.py --input "$LIBRARY" --exclude site-packages '*.txt' \
        --tokenizer-model "$RUN/tokenizer.model" --output-prefix "$RUN/library"
fi

"$PYTHON" pretrain_attnres.py --config examples/quickstart.yaml \
    --summary-file "$RUN/summary.json" "$@"
