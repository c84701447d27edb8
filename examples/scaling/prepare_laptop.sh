#!/usr/bin/env bash
# Tokenizer and data of the laptop grids: the standard library of the running Python, 2,048 pieces.
# Results: runs/laptop. About a minute; does nothing where they are there already.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../environment.sh"
cd "$ROOT"

DATA=runs/laptop
LIBRARY="$("$PYTHON" -c 'from megatron_attnres.data.corpora import standard_library_folder as find
print(find())')"
mkdir -p "$DATA"

if [[ ! -f "$DATA/tokenizer.model" ]]; then
    "$PYTHON" tools/train_tokenizer.py --input "$LIBRARY" --exclude site-packages '*.txt' \
        --vocab-size 2048 --output "$DATA/tokenizer.model"
fi
if [[ ! -f "$DATA/library_text_document.idx" ]]; then
    "$PYTHON" tools/preprocess_data.py --input "$LIBRARY" --exclude site-packages '*.txt' \
        --tokenizer-model "$DATA/tokenizer.model" --output-prefix "$DATA/library"
fi
