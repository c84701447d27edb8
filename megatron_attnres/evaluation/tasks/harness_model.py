"""A trained model as lm-evaluation-harness sees one. Imports the harness."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows

from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.evaluation.perplexity.perplexity import Score
from megatron_attnres.evaluation.scoring.windows import Window, windows_of

Generate = Callable[[Sequence[str], dict[str, Any]], list[str]]
# A request's text (or None for a part of a text), the ids of its context, of its continuation.
Tokenized = tuple[Any, list[int], list[int]]


class HarnessModel(TemplateLM):
    """Answers the harness' requests.

    The harness runs on one rank and knows of no other; whoever scores asks all ranks.

    Args:
        tokenizer: of the model.
        context: most tokens that the model sees at once.
        score: gives back scores in the windows' order.
        generate: texts that continue contexts, by the harness' generation settings.

    Attributes:
        error: that an answer failed with; what else goes wrong is the harness' or a document's.
    """

    error: Exception | None = None

    def __init__(
        self, tokenizer: Tokenizer, context: int, score: Score, generate: Generate
    ) -> None:
        super().__init__()
        self._ids = tokenizer
        self._context = context
        self._score = self._noting(score)
        self._generate = self._noting(generate)

    @property
    def eot_token_id(self) -> int:
        """The end of a document: what an empty context is, as in training."""
        return self._ids.eod

    @property
    def max_length(self) -> int:
        """Most tokens that the model sees at once."""
        return self._context

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, never with a special token around them, as in training."""
        return list(self._ids.tokenize(string))

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Of every continuation after its context, and whether it is the likeliest one."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        """Of whole texts, in the harness' own windows: they do not overlap but for the last."""
        windows: list[Window] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            for seen, predicted in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append(Window(np.array([*seen, predicted[-1]]), len(predicted)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, scores in zip(owners, self._score(windows), strict=True):
            totals[owner] += scores.total
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """Texts that continue contexts, each by the settings of its task."""
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for indices in by_options.values():
            contexts = [requests[index].args[0] for index in indices]
            found = self._generate(contexts, requests[indices[0]].args[1])
            for index, text in zip(indices, found, strict=True):
                texts[index] = text
        return texts

    def _noting(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        def answered(*request: Any) -> Any:
            try:
                return answer(*request)
            except Exception as error:
                self.error = error
                raise

        return answered

    def _loglikelihood_tokens(
        self, requests: list[Tokenized], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Sequences beyond the context lose tokens on the left.

        A continuation that does not fit the context alone is scored in several windows, none of
        its tokens twice. One without a token, which a tokenizer may make of a pair of texts, is
        certain.
        """
        windows: list[Window] = []
        owners: list[int] = []
        for owner, (_, context, continuation) in enumerate(requests):
            tokens = np.array(context + continuation, dtype=np.int64)
            cut = windows_of(tokens, len(continuation), self._context, self._context)
            for window in cut:
                windows.append(window)
                owners.append(owner)
        answers = [(0.0, True)] * len(requests)
        for owner, scores in zip(owners, self._score(windows), strict=True):
            total, greedy = answers[owner]
            answers[owner] = total + scores.total, greedy and bool(scores.greedy.all())
        return answers
