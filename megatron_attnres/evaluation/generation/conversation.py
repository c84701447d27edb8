"""Answering lines that somebody types, on all ranks of a job."""

from collections.abc import Callable, Sequence

from torch import distributed

from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.generation.choosing import Listener
from megatron_attnres.evaluation.generation.generator import Generator
from megatron_attnres.evaluation.generation.interactive import (
    Interrupts,
    follow_the_first_rank,
    typed_lines,
)
from megatron_attnres.evaluation.generation.settings import Generation, GenerationSettings
from megatron_attnres.evaluation.job import Helpers
from megatron_attnres.parallel.agreement import same_error_on_all_ranks

# What the ranks are asked for: ids of a prompt, how to continue it, which line it was.
Request = tuple[Sequence[int], GenerationSettings, int]


class Conversation:
    """Every line of standard input is a prompt on its own; rank 0 reads, all ranks compute.

    Args:
        generator: with the model.
        prepare: ids and settings of a line; an InputError is printed, and the next line is read.
        show: prints what came out.
        listen: told of every piece of text as soon as it is final.
    """

    def __init__(
        self,
        generator: Generator,
        prepare: Callable[[str], tuple[Sequence[int], GenerationSettings]],
        show: Callable[[Generation], None],
        listen: Listener | None,
    ) -> None:
        self._generator = generator
        self._prepare = prepare
        self._show = show
        self._listen = listen
        self._interrupts: Interrupts | None = None

    def run(self) -> None:
        """Until the input ends, or Ctrl-C. Every rank calls it.

        Raises:
            InputError: the model cannot go on; the same on all ranks.
        """
        if distributed.get_rank() == 0:
            self._interrupts = Interrupts()
        else:
            follow_the_first_rank()
        helpers = Helpers(lambda request: self._answer(*request))
        with same_error_on_all_ranks():
            helpers.led(self._lead)

    def _lead(self, ask: Callable[[Request], Generation]) -> None:
        for index, prepared in enumerate(typed_lines(self._prepare, self._interrupts)):
            self._show(ask((*prepared, index)))

    def _answer(
        self, ids: Sequence[int], settings: GenerationSettings, index: int
    ) -> Generation | None:
        interrupts = self._interrupts
        if interrupts is not None:
            return self._generator.generate(
                [ids], settings, index, self._listen, lambda: interrupts.noted
            )
        try:
            return self._generator.generate([ids], settings, index)
        except InputError:
            # Rank 0 has the same one, ends, and shares it once nobody waits for a request.
            return None
