"""A tokenizer without a file, for tests of what shows tokens."""


class ByteTokenizer:
    """A token is a byte of UTF-8; as SentencePiece, it drops a leading blank when it decodes."""

    vocab_size = 257
    eod = 256

    def tokenize(self, text):
        return list(text.encode())

    def detokenize(self, ids):
        whole = bytes(id_ for id_ in ids if id_ < 256).decode("utf-8", "replace")
        return whole.removeprefix(" ")
