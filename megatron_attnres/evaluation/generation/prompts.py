"""Prompts: from flags and files to ids that fit a model. No torch.

A document follows an end of document in training, so a prompt that begins a document is given one
as well (``document_start``). Evaluation gives texts the same.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError

DEFAULT_NEW_TOKENS = 128


@dataclass(frozen=True)
class Prompt:
    """A text to be continued.

    Attributes:
        origin: how it was given, for errors.
        text: may be empty.
    """

    origin: str
    text: str


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model sees it.

    Attributes:
        prompt: the text.
        ids: at least one.
    """

    prompt: Prompt
    ids: tuple[int, ...]


def typed_prompt(origin: str, text: str) -> Prompt:
    """A prompt of a command line or of a terminal.

    Raises:
        InputError: its bytes are no text.
    """
    _check_text(origin, text)
    return Prompt(origin, text)


def prompts_of_file(path: str) -> list[Prompt]:
    """Every line is a prompt, or the field ``prompt`` of every object of a .jsonl file.

    Lines of nothing but blanks are passed by; the field may be empty.

    Raises:
        InputError: the file cannot be read, or a line of it, or it holds no prompt.
    """
    lines = _read("--prompt-file", path).split("\n")
    read = _objects if Path(path).suffix == ".jsonl" else _texts
    prompts = list(read(f"--prompt-file {path}", lines))
    if not prompts:
        raise InputError(f"--prompt-file {path}: holds no prompt; give one a line")
    return prompts


def prompt_of_whole_file(path: str) -> Prompt:
    """The file is one prompt, to the last line end.

    Raises:
        InputError: the file cannot be read, or is empty.
    """
    origin = f"--prompt-whole-file {path}"
    text = _read("--prompt-whole-file", path)
    if not text:
        raise InputError(f'{origin}: the file is empty; for a new document give --prompt ""')
    return Prompt(origin, text)


def encode(prompt: Prompt, tokenizer: Tokenizer, document_start: bool) -> EncodedPrompt:
    """The ids of a prompt.

    Args:
        prompt: the text.
        tokenizer: of the model.
        document_start: put an end of document before it.

    Raises:
        InputError: the tokenizer cannot take the text, or no id comes out.
    """
    try:
        ids = tokenizer.tokenize(prompt.text)
    except InputError as error:
        raise InputError(f"{prompt.origin}: {error}") from None
    if document_start:
        ids = [tokenizer.eod, *ids]
    if not ids:
        raise InputError(
            f"{prompt.origin}: is empty, and --no-document-start leaves nothing to begin with; "
            "give a text"
        )
    return EncodedPrompt(prompt, tuple(ids))


def new_tokens_that_fit(prompts: Sequence[EncodedPrompt], asked: int | None, context: int) -> int:
    """How many tokens to generate, at most.

    The last generated token is not read by the model: a prompt as long as the context leaves room
    for one.

    Args:
        prompts: at least one.
        asked: by ``--max-new-tokens``; None takes 128, or as many as fit.
        context: positions of the model.

    Raises:
        InputError: a prompt does not fit the context, or not with so many tokens after it.
    """
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    origin, length = longest.prompt.origin, len(longest.ids)
    if length > context:
        raise InputError(
            f"{origin}: has {length:,} tokens, and the model's context is {context:,}; shorten it"
        )
    room = context + 1 - length
    if asked is None:
        return min(DEFAULT_NEW_TOKENS, room)
    if asked > room:
        raise InputError(
            f"--max-new-tokens {asked}: beside the {length:,} tokens of {origin}, {room:,} fit the "
            f"model's context of {context:,}; give at most {room:,}, or a shorter prompt"
        )
    return asked


def _texts(origin: str, lines: Sequence[str]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Prompt(f"{origin} (line {number})", line.removesuffix("\r"))


def _objects(origin: str, lines: Sequence[str]) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{origin} (line {number})"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not JSON ({error}); give objects with a prompt") from None
        text = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InputError(f'{where}: has no text under "prompt"; give {{"prompt": "..."}}')
        yield typed_prompt(where, text)


def _check_text(origin: str, text: str) -> None:
    """Refuse bytes, or halves of surrogate pairs, that stand for no character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"{origin}: holds what is no UTF-8; give text") from None


def _read(flag: str, path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{flag} {path}: {error.strerror}; give a readable file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{flag} {path}: not UTF-8 (byte {error.start:,}); give text") from None
