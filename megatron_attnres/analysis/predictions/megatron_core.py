"""Loads Megatron-Core's schedules for a command that runs them over nothing."""

import gc

from megatron_attnres.analysis.predictions.collection import collection_paused
from megatron_attnres.training.quiet import ignore_known_warnings


def load_schedules() -> None:
    """Call before anything that imports them; without a GPU their CUDA calls go to the CPU."""
    ignore_known_warnings()
    with collection_paused():
        from megatron_attnres.parallel.cpu import import_megatron_core, redirect_cuda_calls

        import_megatron_core()
    # What was imported stays: no later search for garbage, the one at exit included, looks at it.
    gc.freeze()
    redirect_cuda_calls()
