"""A page that shows what trained models attend to in depth while somebody types.

python tools/app.py --load runs/a                  http://127.0.0.1:7860
python tools/app.py --load runs/a runs/b           two models side by side
"""

import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.flags import JobFlags, add_tokenizer_flags, tokenizer_of
from megatron_attnres.parallel.layout import ParallelLayout
from megatron_attnres.training.checkpoints.stored_model import find_stored_model

MOST_MODELS = 2


def main(args: Sequence[str]) -> None:
    """Read the flags, load the models, serve until interrupted.

    Raises:
        InputError: a flag or a checkpoint that cannot be used, no gradio, or a taken port.
    """
    arguments = _parser().parse_args(args)
    if len(arguments.load) > MOST_MODELS:
        raise InputError(f"--load {' '.join(arguments.load)}: give at most {MOST_MODELS} models")
    if find_spec("gradio") is None:
        raise InputError("gradio is not installed; pip install 'megatron_attnres[app]'")
    _check_address(arguments.host, arguments.port)
    found = [find_stored_model(given) for given in arguments.load]
    tokenizers = [stored.open_tokenizer(tokenizer_of(arguments)) for stored in found]

    # Only now: torch and gradio take seconds to load.
    from megatron_attnres.training.quiet import ignore_known_warnings

    ignore_known_warnings()
    from megatron_attnres.analysis.live.page import build_page, serve
    from megatron_attnres.analysis.live.reading import LiveModel
    from megatron_attnres.evaluation.job import build_trained, joined

    precision, turn = arguments.precision, Lock()
    with joined(JobFlags(ParallelLayout(), precision, None, timedelta(minutes=10))) as groups:
        models = [
            LiveModel(
                stored, tokenizer, build_trained(stored, groups, precision).chunks[0].module, turn
            )
            for stored, tokenizer in zip(found, tokenizers, strict=True)
        ]
        page = build_page(models)
        serve(page, arguments.host, arguments.port)
        print(f"http://{arguments.host}:{arguments.port} (Ctrl-C ends it)", flush=True)
        # Interrupting it is how it is ended.
        with suppress(KeyboardInterrupt):
            Event().wait()
        page.close(verbose=False)


def _parser() -> CommandParser:
    parser = CommandParser(
        "Serve a page that shows, while text is typed, which sources the layers of one trained "
        "model, or of two, attend to.",
        epilog="Runs in one process, which holds the models. Needs gradio: pip install "
        "'megatron_attnres[app]'. Nothing is sent to other hosts.",
    )
    add = parser.add_argument
    add(
        "--load",
        nargs="+",
        required=True,
        metavar="RUN",
        help="folder of a run, or a checkpoint; of two they are shown side by side",
    )
    add("--port", type=whole_number(1, 65_535), default=7860, metavar="N", help="to listen at")
    add(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="to listen at; any but the default lets other machines in, without a password",
    )
    add(
        "--precision",
        choices=["fp32", "bf16"],
        help="of parameters and activations; not given: as the model was trained",
    )
    add_tokenizer_flags(parser)
    return parser


def _check_address(host: str, port: int) -> None:
    """Refuse an address before models are loaded for it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such address"
        raise InputError(
            f"--host {host} --port {port}: cannot be listened at ({reason}); give a free port and "
            "an address of this machine"
        ) from None


if __name__ == "__main__":
    run_command(main)
