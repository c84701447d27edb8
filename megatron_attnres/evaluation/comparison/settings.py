"""What to evaluate, as plain data, checked against the models. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_attnres.data.configuration import TokenizerConfig
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.evaluation.tasks.request import TaskRequest
from megatron_attnres.training.checkpoints.stored_model import StoredModel


@dataclass(frozen=True)
class CorpusRequest:
    """Documents whose perplexity is measured; of ``text`` and ``data_path`` one is given.

    Attributes:
        text: files and folders.
        json_key: field or column that holds the text.
        exclude: names inside folders to pass by.
        data_path: prefix of a .bin / .idx pair.
        max_documents, max_tokens: read no further; None for all.
    """

    text: tuple[str, ...] = ()
    json_key: str = "text"
    exclude: tuple[str, ...] = ()
    data_path: str | None = None
    max_documents: int | None = None
    max_tokens: int | None = None

    @property
    def name(self) -> str:
        """For tables."""
        return self.data_path or " ".join(self.text)


@dataclass(frozen=True)
class EvaluationSettings:
    """All that decides on an evaluation but the models.

    Attributes:
        job: ranks and data type.
        tokenizer: None where the checkpoints say it.
        corpus: for perplexity; None for none.
        tasks: None for none.
        context: most tokens that a model sees at once; None for its own.
        stride: tokens between the ends of two windows of a document; None for the context.
        batch_size: windows of a micro-batch.
    """

    job: JobFlags
    tokenizer: TokenizerConfig | None
    corpus: CorpusRequest | None
    tasks: TaskRequest | None
    context: int | None
    stride: int | None
    batch_size: int

    def context_of(self, stored: StoredModel) -> int:
        """Most tokens that this model sees at once."""
        return self.context or stored.model.seq_length

    def stride_of(self, stored: StoredModel) -> int:
        """Tokens between the ends of two windows of a document."""
        return self.stride or self.context_of(stored)


def check_windows(settings: EvaluationSettings, runs: Sequence[StoredModel]) -> None:
    """Refuse windows that a model cannot see.

    Raises:
        InputError: see above.
    """
    for stored in runs:
        longest = stored.model.seq_length
        if settings.context is not None and settings.context > longest:
            raise InputError(
                f"--context {settings.context}: the model of --load {stored.given} was trained on "
                f"{longest} tokens; give at most that"
            )
        context = settings.context_of(stored)
        if settings.stride is not None and settings.stride > context:
            raise InputError(
                f"--stride {settings.stride}: is more than the context of {context} tokens that "
                f"--load {stored.given} is given; windows would leave tokens out"
            )
