"""Perplexity and tasks of trained runs, side by side.

python tools/evaluate.py --load runs/a runs/b --text novel.txt
python tools/evaluate.py --load runs/a --tasks wikitext,hellaswag --num-fewshot 5 --limit 100
python tools/evaluate.py --load runs/a --nproc-per-node 4 --pipeline-model-parallel-size 2 \\
    --data-path corpus/text_document --max-tokens 1000000 --output figures.json
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command, whole_number
from megatron_attnres.data.files import written_at_once
from megatron_attnres.errors import InputError
from megatron_attnres.evaluation.comparison.settings import (
    CorpusRequest,
    EvaluationSettings,
    check_windows,
)
from megatron_attnres.evaluation.flags import (
    add_job_flags,
    add_tokenizer_flags,
    job_of,
    on_ranks,
    tokenizer_of,
)
from megatron_attnres.evaluation.perplexity.documents import check_corpus
from megatron_attnres.evaluation.tasks.harness_tasks import require_harness
from megatron_attnres.evaluation.tasks.request import TaskRequest, task_data, task_names
from megatron_attnres.output_files import check_output_file, write_output_file
from megatron_attnres.training.checkpoints.stored_model import StoredModel, find_stored_model
from megatron_attnres.training.checks import flag

if TYPE_CHECKING:
    from megatron_attnres.evaluation.comparison.results import RunResult

# Flags that say something only beside one of others.
NEEDS = {
    ("stride", "max_documents", "max_tokens"): ("text", "data_path"),
    ("exclude",): ("text",),
    ("num_fewshot", "limit", "include_path", "task_data"): ("tasks",),
}


def main(args: Sequence[str]) -> None:
    """Read the flags, evaluate on the ranks, print.

    Raises:
        InputError: a flag, checkpoint, corpus or task that cannot be used.
    """
    arguments = _parser().parse_args(args)
    settings = _settings(arguments)
    if settings.corpus is not None:
        check_corpus(settings.corpus)
    runs = [find_stored_model(given) for given in arguments.load]
    check_windows(settings, runs)
    check_output_file("--output", arguments.output)
    on_ranks(arguments, lambda: _evaluate(arguments, runs, settings))


def _parser() -> CommandParser:
    parser = CommandParser(
        "Measure perplexity and tasks of trained runs, on any layout of ranks.",
        epilog="Several runs are evaluated one after the other and shown side by side. Every token "
        "of a text is scored once, its first one given an end of document; the end of a document "
        "itself is not scored.",
    )
    parser.add_argument(
        "--load",
        nargs="+",
        required=True,
        metavar="RUN",
        help="run folders, folders made by --save, or checkpoints",
    )
    for add_group in (_add_perplexity, _add_tasks, _add_scoring):
        add_group(parser)
    add_tokenizer_flags(parser)
    add_job_flags(parser, pipeline=True)
    group = parser.add_argument_group("output")
    group.add_argument("--output", metavar="FILE.json", help="write what --json prints to a file")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object, floats in full")
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    return parser


def _add_perplexity(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("perplexity")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="of text files, JSON lines, Parquet, folders of them: what tools/preprocess_data.py "
        "takes as --input",
    )
    source.add_argument(
        "--data-path", metavar="PREFIX", help="of the documents of a .bin / .idx pair"
    )
    add = group.add_argument
    add("--json-keys", default="text", metavar="KEY", help="field or column that holds the text")
    add(
        "--exclude",
        nargs="+",
        default=[],
        metavar="NAME",
        help="files and folders inside folders of --text to pass by",
    )
    add(
        "--stride",
        type=whole_number(1),
        metavar="TOKENS",
        help="between the ends of two windows of a document; smaller than the context it lets "
        "every token see at least context - stride tokens before it; not given: the context",
    )
    add("--max-documents", type=whole_number(1), metavar="N", help="read no further")
    add("--max-tokens", type=whole_number(1), metavar="N", help="read no further")


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tasks of lm-evaluation-harness (the extra eval)")
    add = group.add_argument
    add(
        "--tasks",
        metavar="NAMES",
        help="names of the harness, separated by commas; wikitext2 is wikitext, lambada is "
        "lambada_openai",
    )
    add(
        "--num-fewshot",
        type=whole_number(0),
        metavar="N",
        help="examples in front of every question; not given: the task's own number",
    )
    add("--limit", type=whole_number(1), metavar="N", help="only the first N documents of a task")
    add("--include-path", metavar="DIR", help="folder of task YAMLs of your own")
    add(
        "--task-data",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FILE.jsonl",
        help="documents of a task from JSON lines in the schema of its data set, instead of the "
        "hub; can be given several times",
    )


def _add_scoring(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scoring")
    group.add_argument(
        "--context",
        type=whole_number(1),
        metavar="TOKENS",
        help="most tokens that a model sees at once; not given: what it was trained on",
    )
    group.add_argument(
        "--batch-size", type=whole_number(1), default=8, metavar="N", help="windows at once"
    )


def _settings(arguments: argparse.Namespace) -> EvaluationSettings:
    for names, others in NEEDS.items():
        for name in names:
            value = getattr(arguments, name)
            if value and not any(getattr(arguments, one) for one in others):
                given = " ".join(value) if isinstance(value, list) else value
                raise InputError(f"{flag(name)} {given}: needs {' or '.join(map(flag, others))}")
    corpus = _corpus(arguments)
    tasks = _tasks(arguments)
    if corpus is None and tasks is None:
        raise InputError("--tasks: missing; give tasks, or --text or --data-path for perplexity")
    return EvaluationSettings(
        job_of(arguments),
        tokenizer_of(arguments),
        corpus,
        tasks,
        arguments.context,
        arguments.stride,
        arguments.batch_size,
    )


def _corpus(arguments: argparse.Namespace) -> CorpusRequest | None:
    if not arguments.text and arguments.data_path is None:
        return None
    return CorpusRequest(
        tuple(arguments.text),
        arguments.json_keys,
        tuple(arguments.exclude),
        arguments.data_path,
        arguments.max_documents,
        arguments.max_tokens,
    )


def _tasks(arguments: argparse.Namespace) -> TaskRequest | None:
    if arguments.tasks is None:
        return None
    names = task_names(arguments.tasks)
    folder = arguments.include_path
    if folder is not None and not Path(folder).is_dir():
        raise InputError(f"--include-path {folder}: no such folder; give one of task YAMLs")
    data = task_data(arguments.task_data, names)
    require_harness()
    return TaskRequest(names, data, folder, arguments.num_fewshot, arguments.limit)


def _evaluate(
    arguments: argparse.Namespace, runs: Sequence[StoredModel], settings: EvaluationSettings
) -> None:
    """On one rank; rank 0 prints."""
    from megatron_attnres.training.quiet import ignore_known_warnings

    ignore_known_warnings()
    from megatron_attnres.parallel.cpu import import_megatron_core

    import_megatron_core()
    from megatron_attnres.evaluation.comparison.runs import evaluate_runs

    results = evaluate_runs(runs, settings)
    if results is not None:
        _report(arguments, results, settings)


def _report(
    arguments: argparse.Namespace, results: "Sequence[RunResult]", settings: EvaluationSettings
) -> None:
    from megatron_attnres.evaluation.comparison.results import as_object
    from megatron_attnres.evaluation.comparison.table import comparison_table

    text = json.dumps(as_object(results, settings))
    if arguments.output is not None:
        write_output_file("--output", arguments.output, lambda path: _write_at_once(path, text))
    if arguments.json:
        print(text)
    else:
        corpus = settings.corpus.name if settings.corpus is not None else None
        print(comparison_table(results, corpus, arguments.markdown))


def _write_at_once(path: Path, text: str) -> None:
    with written_at_once(path) as file:
        file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_command(main)
