"""Text that a trained model continues prompts with.

python tools/generate.py --load runs/a --prompt "def main("
python tools/generate.py --load runs/a --prompt-file prompts.txt --temperature 0.8 --num-samples 4
python tools/generate.py --load runs/a --interactive --nproc-per-node 2 \\
    --tensor-model-parallel-size 2
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command
from megatron_attnres.data.tokenizers import Tokenizer
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.flags import (
    JobFlags,
    add_job_flags,
    add_tokenizer_flags,
    job_of,
    on_ranks,
    tokenizer_of,
)
from megatron_attnres.evaluation.generation.flags import add_generation_flags, generation_of
from megatron_attnres.evaluation.generation.prompts import (
    EncodedPrompt,
    Prompt,
    encode,
    new_tokens_that_fit,
    prompt_of_whole_file,
    prompts_of_file,
    typed_prompt,
)
from megatron_attnres.evaluation.generation.report import (
    as_object,
    pace_line,
    sample_lines,
    text_lines,
)
from megatron_attnres.evaluation.generation.settings import Generation, GenerationSettings
from megatron_attnres.training.checkpoints.stored_model import StoredModel, find_stored_model

if TYPE_CHECKING:
    from megatron_attnres.evaluation.generation.generator import Generator


def main(args: Sequence[str]) -> None:
    """Read the flags, generate on the ranks, print.

    Raises:
        InputError: a flag, checkpoint or prompt that cannot be used.
    """
    arguments = _parser().parse_args(args)
    settings = generation_of(arguments)
    _check_output(arguments)
    job = job_of(arguments)
    stored = find_stored_model(arguments.load)
    tokenizer = stored.open_tokenizer(tokenizer_of(arguments))
    prompts = [
        encode(prompt, tokenizer, arguments.document_start) for prompt in _prompts(arguments, job)
    ]
    if prompts:
        settings = _fitting(settings, prompts, arguments, stored)

    def work(generator: "Generator") -> None:
        if arguments.interactive:
            _converse(generator, tokenizer, settings, arguments, stored)
        else:
            _continue(generator, prompts, settings, arguments, stored)

    with _ctrl_c_is_an_end(arguments.interactive):
        on_ranks(arguments, lambda: _with_generator(stored, tokenizer, job, work))


def _parser() -> CommandParser:
    parser = CommandParser(
        "Continue prompts with a trained model.",
        epilog="A prompt is taken for the beginning of a document, which in training follows an "
        "end of document, and gets one before it; leave that out with --no-document-start for the "
        "middle of a text. The same model, prompt and seed give the same text, whatever else is "
        "generated beside it, up to rounding.",
    )
    parser.add_argument(
        "--load",
        required=True,
        metavar="RUN",
        help="run folder, folder made by --save, or checkpoint",
    )
    for add_group in (_add_prompts, add_generation_flags, _add_output):
        add_group(parser)
    add_tokenizer_flags(parser)
    add_job_flags(parser, pipeline=False)
    return parser


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    source = group.add_mutually_exclusive_group(required=True)
    add = source.add_argument
    add("--prompt", nargs="+", metavar="TEXT", help='texts to continue; "" begins a document')
    add(
        "--prompt-file",
        metavar="FILE",
        help='a prompt a line; of a .jsonl file the field "prompt" of each',
    )
    add("--prompt-whole-file", metavar="FILE", help="the file is one prompt")
    add(
        "--interactive",
        action="store_true",
        help="read prompts from standard input, each on its own, until it ends or Ctrl-C",
    )
    group.add_argument(
        "--document-start",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put an end of document before each prompt, as in training",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="print a single text while it grows; not given: on a terminal, and with --interactive",
    )
    add("--json", action="store_true", help="print one JSON object: texts, token ids, rates")


def _check_output(arguments: argparse.Namespace) -> None:
    if arguments.json and arguments.interactive:
        raise InputError("--json: is one object, which --interactive has no end for; give prompts")
    if arguments.json and arguments.stream:
        raise InputError("--stream: prints text, and --json an object; give one of them")
    if arguments.stream and arguments.num_samples > 1:
        raise InputError(
            f"--stream: of one text only, not of --num-samples {arguments.num_samples}"
        )


def _prompts(arguments: argparse.Namespace, job: JobFlags) -> list[Prompt]:
    """None of ``--interactive``."""
    for flag in ("prompt_file", "prompt_whole_file"):
        path = getattr(arguments, flag)
        if path is not None and job.layout.world_size > 1:
            _check_readable_again(f"--{flag.replace('_', '-')}", Path(path))
    if arguments.prompt is not None:
        several = len(arguments.prompt) > 1
        prompts = [
            typed_prompt(f"--prompt (number {number})" if several else "--prompt", text)
            for number, text in enumerate(arguments.prompt, start=1)
        ]
    elif arguments.interactive:
        prompts = []
    elif arguments.prompt_whole_file is not None:
        prompts = [prompt_of_whole_file(arguments.prompt_whole_file)]
    else:
        prompts = prompts_of_file(arguments.prompt_file)
    if arguments.stream and len(prompts) > 1:
        raise InputError(f"--stream: of one text only, not of {len(prompts)} prompts")
    return prompts


def _check_readable_again(flag: str, path: Path) -> None:
    """Every rank reads it, and the process that starts them."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{flag} {path}: can be read only once, by one rank; give a regular file")


def _fitting(
    settings: GenerationSettings,
    prompts: Sequence[EncodedPrompt],
    arguments: argparse.Namespace,
    stored: StoredModel,
) -> GenerationSettings:
    """With as many new tokens as the prompts leave room for."""
    fitting = new_tokens_that_fit(prompts, arguments.max_new_tokens, stored.model.seq_length)
    return replace(settings, max_new_tokens=fitting)


def _continue(
    generator: "Generator",
    prompts: Sequence[EncodedPrompt],
    settings: GenerationSettings,
    arguments: argparse.Namespace,
    stored: StoredModel,
) -> None:
    """Prompts that are there from the beginning. On one rank; rank 0 prints."""
    ids = [prompt.ids for prompt in prompts]
    if not _is_first_rank():
        generator.generate(ids, settings)
        return
    single = len(prompts) == settings.num_samples == 1 and not arguments.json
    streams = single and (sys.stdout.isatty() if arguments.stream is None else arguments.stream)
    if streams:
        _print_piece(prompts[0].prompt.text)
    generation = generator.generate(ids, settings, listen=_listener(streams))
    if arguments.json:
        of_model = {"load": stored.given, "iteration": stored.iteration}
        print(json.dumps(of_model | as_object(prompts, generation, settings)))
        return
    print("" if streams else "\n".join(text_lines(prompts, generation)), flush=True)
    print(pace_line(generation), file=sys.stderr)


def _converse(
    generator: "Generator",
    tokenizer: Tokenizer,
    settings: GenerationSettings,
    arguments: argparse.Namespace,
    stored: StoredModel,
) -> None:
    """Prompts that rank 0 reads while the model waits. On one rank."""
    from megatron_attnres.evaluation.generation.conversation import Conversation

    streams = settings.num_samples == 1 and arguments.stream is not False

    def prepare(line: str) -> tuple[Sequence[int], GenerationSettings]:
        prompt = encode(typed_prompt("this line", line), tokenizer, arguments.document_start)
        return prompt.ids, _fitting(settings, [prompt], arguments, stored)

    def show(generation: Generation) -> None:
        print("" if streams else "\n".join(sample_lines(generation)), flush=True)
        print(pace_line(generation), file=sys.stderr, flush=True)

    Conversation(generator, prepare, show, _listener(streams)).run()


def _listener(streams: bool) -> Callable[[int, int, str], None] | None:
    return (lambda prompt, sample, piece: _print_piece(piece)) if streams else None


def _with_generator(
    stored: StoredModel,
    tokenizer: Tokenizer,
    job: JobFlags,
    work: "Callable[[Generator], None]",
) -> None:
    """Be one of the ranks: join, build the model, do the work."""
    from megatron_attnres.training.quiet import ignore_known_warnings

    ignore_known_warnings()
    from megatron_attnres.parallel.cpu import import_megatron_core

    import_megatron_core()
    from megatron_attnres.evaluation.generation.generator import Generator
    from megatron_attnres.evaluation.job import build_trained, joined

    with joined(job) as groups:
        step = build_trained(stored, groups, job.precision)
        work(Generator(step.chunks[0].module, groups, tokenizer))


@contextmanager
def _ctrl_c_is_an_end(interactive: bool) -> Iterator[None]:
    """Ctrl-C is how a conversation ends, also one of ranks that this process has started."""
    try:
        yield
    except SystemExit as error:
        if not (interactive and error.code == 128 + signal.SIGINT):
            raise


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)


if __name__ == "__main__":
    run_command(main)
