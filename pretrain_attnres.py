"""Pretrain a GPT with Attention Residuals: read the configuration, build, train."""

import os
import sys

from megatron_attnres.errors import EXIT_STATUS_BAD_INPUT, InputError
from megatron_attnres.training.configuration import read_configuration
from megatron_attnres.training.launch import STOP_SIGNALS, launch, under_launcher
from megatron_attnres.training.quiet import ignore_known_warnings


def main(argv: list[str]) -> int:
    """Returns the exit status: 0, or 2 for a value or file that cannot be used."""
    try:
        config, tokenizer = read_configuration(argv[1:])
        if config.nproc_per_node and not under_launcher():
            forwarded = STOP_SIGNALS if config.loop.save_on_signal else ()
            return launch(argv, config.nproc_per_node, forwarded)

        # torch and Megatron-Core take seconds to import: only a run that will start pays for them.
        ignore_known_warnings()
        from megatron_attnres.parallel.cpu import import_megatron_core

        import_megatron_core()
        from megatron_attnres.training.pretrain import pretrain

        pretrain(config, tokenizer)
    except InputError as error:
        # All ranks of a host arrive here with the same error; one of them says so.
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
            print(f"{argv[0]}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_STATUS_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
