"""Pretrain a GPT with Attention Residuals: read the configuration, build, train."""

import faulthandler
import os
import sys

from megatron_attnres.errors import (
    EXIT_STATUS_BAD_INPUT,
    EXIT_STATUS_FAILED,
    EXIT_STATUS_GAVE_UP,
    InputError,
    JoinError,
    TrainingGaveUp,
)
from megatron_attnres.training.configuration import read_configuration
from megatron_attnres.training.launch import (
    STACK_SIGNAL,
    STOP_SIGNALS,
    import_for_ranks,
    launch,
    under_launcher,
)
from megatron_attnres.training.quiet import ignore_known_warnings
from megatron_attnres.training.signals import SignalNote

STATUS_OF = {
    InputError: EXIT_STATUS_BAD_INPUT,
    TrainingGaveUp: EXIT_STATUS_GAVE_UP,
    JoinError: EXIT_STATUS_FAILED,
}


def main(argv: list[str]) -> int:
    """Returns the exit status: 0, or that of the error (errors.py)."""
    try:
        config, tokenizer = read_configuration(argv[1:])
        stop_signals = STOP_SIGNALS if config.loop.save_on_signal else ()
        if config.nproc_per_node and not under_launcher():
            stopped_status = config.loop.exit_status_when_stopped
            forwarded = (*stop_signals, STACK_SIGNAL)
            return launch(argv, config.nproc_per_node, forwarded, stopped_status, import_for_ranks)

        signals = SignalNote(stop_signals)
        # Until the run's folder is known; the default action of the signal is to die.
        faulthandler.register(STACK_SIGNAL, all_threads=True)
        # torch and Megatron-Core take seconds to import: only a run that will start pays for them.
        ignore_known_warnings()
        from megatron_attnres.parallel.cpu import import_megatron_core

        import_megatron_core()
        from megatron_attnres.training.pretrain import pretrain

        return pretrain(config, tokenizer, signals)
    except tuple(STATUS_OF) as error:
        # All ranks of a host arrive here with the same error; one of them says so.
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
            print(f"{argv[0]}: {' '.join(str(error).split())}", file=sys.stderr)
        return STATUS_OF[type(error)]


if __name__ == "__main__":
    sys.exit(main(sys.argv))
