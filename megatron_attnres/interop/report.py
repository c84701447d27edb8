"""What a conversion did. Plain data."""

from dataclasses import dataclass

from megatron_attnres.interop.hf_config import Precision


@dataclass(frozen=True)
class Converted:
    """For the command to print.

    Attributes:
        architecture: the class of the Hugging Face model.
        parameters: numbers converted; tied embeddings count once.
        added_parameters: of readers from depth that the source has not, set to do nothing at first.
        tensors: of the Hugging Face folder.
        dtype: of these tensors.
        tokenizer: what became of it.
        save: the folder made.
    """

    architecture: str
    parameters: int
    added_parameters: int
    tensors: int
    dtype: Precision
    tokenizer: str
    save: str
