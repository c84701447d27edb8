"""Checkpoints of every mode, scored on the layouts of a job; and the same from whole logits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_attnres.depth_attention.state import DepthState
from megatron_attnres.evaluation.job import build_trained
from megatron_attnres.evaluation.scoring.chunk import ScoringChunk
from megatron_attnres.evaluation.scoring.scorer import Scorer
from megatron_attnres.model.gpt import GPTChunk
from megatron_attnres.parallel.groups import initialize_groups
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.distributed import GROUP_TIMEOUT, restart_job
from tests.evaluation.checkpoints import make_checkpoint
from tests.layouts import small_model

MODES = ("baseline", "block", "full")
ONE, VIRTUAL = ParallelLayout(), ParallelLayout(1, 2, 2)
LAYOUTS_OF = {
    1: [ONE],
    2: [VIRTUAL, ParallelLayout(2), ParallelLayout(2, sequence_parallel=True)],
    4: [ParallelLayout(1, 2, 1, 2)],
}
ALL_AT_ONCE = ParallelLayout(2, 2, 2, 1, True)
CONTEXT = 32
# Of a vocabulary of 64, as the NullTokenizer of 60 ids and an end of document has it.
REAL_IDS, EOD = 61, 60
BATCH_SIZE = 4


def make_models(folder: Path) -> dict[str, Path]:
    """A checkpoint of every mode."""
    return {
        mode: make_checkpoint(folder / mode, small_model(mode=mode, tied=False, seq_length=CONTEXT))
        for mode in MODES
    }


def open_scorer(folder: Path, layout: ParallelLayout, **options) -> Scorer:
    """On the ranks of the current job, which belongs to it."""
    groups = initialize_groups(layout, GROUP_TIMEOUT)
    step = build_trained(find_stored_model(str(folder)), groups, "fp32", ScoringChunk)
    return Scorer(step, groups, REAL_IDS, BATCH_SIZE, **options)


def on_every_layout(models, layouts: Sequence[ParallelLayout], measure):
    """``measure(scorer)`` of every model on layouts: {(mode, layout): result} on rank 0."""
    found = {}
    for mode, folder in models.items():
        for layout in layouts:
            found[mode, layout] = measure(open_scorer(folder, layout))
            restart_job()
    return found


def whole_logits(model: GPTChunk, tokens: Sequence[int]) -> Tensor:
    """Of a whole model and one sequence, [s, vocabulary], by nothing but the model's own parts."""
    ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64))[None]
    with torch.no_grad():
        hidden = model.embedding(ids).transpose(0, 1).contiguous()
        state = DepthState((), hidden) if model.baseline else DepthState((hidden,), None)
        rotary = (model.rotary_cosines, model.rotary_sines)
        return model.logits_of(model.layers(state, rotary))[:, 0].double()
