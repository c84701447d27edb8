"""Live models of random weights whose tokens are bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Lock

from megatron_attnres.analysis.live.reading import LiveModel
from megatron_attnres.evaluation.flags import JobFlags
from megatron_attnres.evaluation.job import build_trained, joined
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import find_stored_model
from tests.analysis.byte_tokenizer import ByteTokenizer
from tests.evaluation.checkpoints import make_checkpoint
from tests.layouts import small_model

CONTEXT = 48


@contextmanager
def live_models(folder: Path) -> Iterator[tuple[LiveModel, LiveModel]]:
    """One of blocks and a baseline, in a job of this process."""
    turn = Lock()
    with joined(JobFlags(ParallelLayout(), None, None, timedelta(minutes=1))) as groups:
        models = []
        for mode in ("block", "baseline"):
            model = small_model(num_layers=3, mode=mode, seq_length=CONTEXT)
            model = replace(model, vocab_size=ByteTokenizer.vocab_size)
            stored = find_stored_model(str(make_checkpoint(folder / mode, model)))
            module = build_trained(stored, groups).chunks[0].module
            models.append(LiveModel(stored, ByteTokenizer(), module, turn))
        yield tuple(models)
