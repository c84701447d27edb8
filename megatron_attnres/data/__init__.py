"""From text to micro-batches: tokenizers, corpora, indexed datasets, batches.

The way of a text through this package::

    corpora      files, folders, saved datasets -> documents
    tokenizers   documents <-> token ids (tokenizer_training makes a new SentencePiece model)
    preprocess   documents -> Megatron-Core's .bin / .idx pair
    datasets     .bin / .idx pairs, blended and split -> samples of ``seq_length`` tokens
    batches      samples -> micro-batches of one data-parallel rank

Nothing is imported here: a command that only checks its flags must not wait for torch.
"""
