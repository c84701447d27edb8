"""A job of ranks that computes with trained models: join, build, load.

Rank 0 decides what is computed and the others help (``Helpers``): a harness, a prompt or a page
runs on one rank, whatever the layout of the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from megatron_attnres.errors import LostRankError
from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.optimizer.configuration import DATA_TYPES
from megatron_attnres.parallel.agreement import same_error_on_all_ranks
from megatron_attnres.parallel.groups import (
    ParallelGroups,
    initialize_distributed,
    initialize_groups,
    leave_job,
)
from megatron_attnres.pipeline.schedule import ScheduleConfig
from megatron_attnres.pipeline.step import PipelineStep
from megatron_attnres.training.build import build_step
from megatron_attnres.training.checkpoints.loading import named
from megatron_attnres.training.checkpoints.stored_model import StoredModel
from megatron_attnres.training.checkpoints.weights import load_weights
from megatron_attnres.training.layout_checks import check_model
from megatron_attnres.training.watching.elsewhere import comes_from_elsewhere

Answer = TypeVar("Answer")
# Rank 0 may think, or wait for somebody to type, for as long as it likes; when it dies, the
# launcher ends the others.
_PATIENCE = timedelta(days=365)


@contextmanager
def joined(job: JobFlags) -> Iterator[ParallelGroups]:
    """Be one of the job's ranks: its process groups, which end with the body.

    Raises:
        JoinError: not all ranks came.
        LostRankError: another rank is gone, or keeps this one waiting for too long.
    """
    initialize_distributed(job.timeout, job.backend)
    rank = distributed.get_rank()
    try:
        yield initialize_groups(job.layout, job.timeout)
    except BrokenPipeError:
        # Of standard output: no other rank has to do with it.
        raise
    except Exception as error:
        if not comes_from_elsewhere(error):
            raise
        reason = " ".join(str(error).split())
        raise LostRankError(f"rank {rank}: another rank is gone or too late ({reason})") from error
    finally:
        leave_job()


def build_trained(
    stored: StoredModel,
    groups: ParallelGroups,
    precision: str | None = None,
    chunk_type: type[GPTChunk] = GPTChunk,
) -> PipelineStep:
    """This rank's part of a trained model, with its weights. Collective.

    Args:
        stored: the checkpoint.
        groups: of the layout to build it on.
        precision: of parameters and activations; None is the model's own.
        chunk_type: of the model's chunks.

    Returns:
        A step over micro-batches of one whole context; ``resized`` makes other shapes of it.

    Raises:
        InputError: the layout does not fit the model, or the checkpoint cannot be loaded; the same
            on all ranks.
    """
    with same_error_on_all_ranks(), named(stored.given):
        check_model(stored.model, groups.layout)
    layout, model = groups.layout, stored.model
    step = build_step(
        model,
        groups,
        1,
        getattr(torch, DATA_TYPES[precision or stored.precision]),
        seed=0,
        schedule=ScheduleConfig(layout.pipeline, True, "none", "cached", True),
        chunk_type=chunk_type,
    )
    load_weights(stored.folder, stored.given, step.chunks, groups)
    for chunk in step.chunks:
        chunk.eval()
    return step


class Helpers:
    """How rank 0 gets all ranks to answer a request together.

    Args:
        answer: what every rank does with a request, together; collective.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def led(self, lead: Callable[[Callable[[Any], Any]], Answer]) -> Answer | None:
        """Run ``lead`` on rank 0, which may call its argument with picklable requests.

        Returns:
            What ``lead`` returns; None on the other ranks.

        Raises:
            Exception: whatever ``lead`` raises, on rank 0.
        """
        if distributed.get_rank() != 0:
            self._help()
            return None
        try:
            answer = lead(self._ask)
        except Exception:
            self._tell(None)
            raise
        # After an interrupt nobody is told: the others are interrupted as well, or gone already.
        self._tell(None)
        return answer

    def _ask(self, request: Any) -> Any:
        self._tell(request)
        return self._answer(request)

    def _help(self) -> None:
        while (request := self._tell(None)) is not None:
            self._answer(request)

    def _tell(self, request: Any) -> Any:
        told = [request]
        distributed.broadcast_object_list(told, group=self._group)
        return told[0]
