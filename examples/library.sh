# Sourced by scripts that train on the standard library of the running Python; environment.sh comes first.

# Makes tokenizer and data in a folder, where they are not there already.
prepare_library() {
    local folder="$1" vocab_size="$2" library
    library="$("$PYTHON" -c 'from megatron_attnres.data.corpora import standard_library_folder as find
print(find())')"
    mkdir -p "$folder"
    if [[ ! -f "$folder/tokenizer.model" ]]; then
        "$PYTHON" tools/train_tokenizer.py --input "$library" --exclude site-packages '*.txt' \
            --vocab-size "$vocab_size" --output "$folder/tokenizer.model"
    fi
    if [[ ! -f "$folder/library_text_document.idx" ]]; then
        "$PYTHON" tools/preprocess_data.py --input "$library" --exclude site-packages '*.txt' \
            --tokenizer-model "$folder/tokenizer.model" --output-prefix "$folder/library"
    fi
}
