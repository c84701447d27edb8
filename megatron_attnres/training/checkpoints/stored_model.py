"""The model in a checkpoint, as plain data: enough to build it again and feed it. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.data.tokenizers import Tokenizer, identity_of, load_tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.model.configuration import AttnResConfig, ModelConfig
from megatron_attnres.training.checkpoints.description import DESCRIPTION, Description
from megatron_attnres.training.checkpoints.folders import (
    CHECKSUMS,
    LATEST,
    digests_in,
    newest,
    verify,
)
from megatron_attnres.training.watching.run_folder import RunFolder


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint's model.

    Attributes:
        given: the path as typed, for errors and tables.
        folder: the checkpoint.
        model: sizes and residual connections.
        tokenizer: whose ids it was trained on; None if the checkpoint does not know.
        tokenizer_identity: what tells that tokenizer from others; empty if it is not known.
        precision: ``fp32`` or ``bf16``, of the parameters that it computed with.
        iteration: finished iterations.
        tokens: trained on.
    """

    given: str
    folder: Path
    model: ModelConfig
    tokenizer: TokenizerConfig | None
    tokenizer_identity: dict[str, Any]
    precision: str
    iteration: int
    tokens: int

    def open_tokenizer(self, instead: TokenizerConfig | None = None) -> Tokenizer:
        """The tokenizer of the model's ids.

        Args:
            instead: another place to read it from; paths in a checkpoint are as they were typed
                when it was trained.

        Raises:
            InputError: none is known, its file cannot be read, or it makes other ids.
        """
        config = instead or self.tokenizer
        if config is None:
            raise InputError(
                f"--load {self.given}: does not name its tokenizer; give --tokenizer-model"
            )
        try:
            tokenizer = load_tokenizer(config)
        except InputError as error:
            if instead is not None:
                raise
            raise InputError(
                f"--load {self.given}: its tokenizer cannot be opened ({error}); give "
                "--tokenizer-model"
            ) from error
        self._check(tokenizer, config)
        return tokenizer

    def _check(self, tokenizer: Tokenizer, config: TokenizerConfig) -> None:
        name = f"--tokenizer-model {config.tokenizer_model}"
        if config.tokenizer_model is None:
            name = f"--vocab-size {config.vocab_size}"
        found, wanted = identity_of(tokenizer), self.tokenizer_identity
        if wanted and found != wanted:
            what = ", ".join(
                f"{field} {found[field]} instead of {wanted[field]}"
                for field in ("vocab_size", "eod")
                if found[field] != wanted[field]
            )
            raise InputError(
                f"{name}: is not the tokenizer of {self.given} "
                f"({what or 'it cuts text into other tokens'}); give the one it was trained with"
            )
        if tokenizer.vocab_size > self.model.vocab_size:
            raise InputError(
                f"{name}: has {tokenizer.vocab_size} ids, the model of {self.given} "
                f"{self.model.vocab_size}; give the tokenizer that it was trained with"
            )


def find_stored_model(given: str) -> StoredModel:
    """The newest checkpoint of a run folder or of a folder made by ``--save``, or one checkpoint.

    Raises:
        InputError: there is none, or its description cannot be read or was changed.
    """
    path = Path(given)
    if not path.is_dir():
        raise InputError(f"--load {given}: no such folder; give a run's folder or a checkpoint")
    if not any((path / name).is_file() for name in (CHECKSUMS, LATEST)):
        path = RunFolder(path).checkpoints
    if not path.is_dir():
        raise InputError(
            f"--load {given}: holds no checkpoint; give a run's folder or a checkpoint, or let "
            "tools/convert_checkpoint.py --from hf make one of a Hugging Face folder"
        )
    try:
        folder = newest(str(path))
        # Before it is believed: what was edited may still look like a model.
        verify(folder, [DESCRIPTION], digests_in(folder))
        description = Description.read(folder)
    except InputError as error:
        raise InputError(f"--load {given}: {error}") from error
    except OSError as error:
        raise InputError(f"--load {given}: {error.strerror}; give a readable folder") from error
    configuration = description.configuration
    try:
        attn_res = AttnResConfig(**configuration["model"]["attn_res"])
        model = ModelConfig(**configuration["model"] | {"attn_res": attn_res})
        tokenizer = configuration["tokenizer"]
        precision = configuration["optimizer"]["precision"]
        return StoredModel(
            given,
            folder,
            model,
            None if tokenizer is None else TokenizerConfig(**tokenizer),
            description.tokenizer,
            precision,
            description.state.iteration,
            description.state.tokens,
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"--load {given}: {folder} describes no usable model ({error})") from error
