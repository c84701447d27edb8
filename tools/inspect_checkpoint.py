"""What a checkpoint holds, whether it is whole, and where it differs from another.

python tools/inspect_checkpoint.py runs/a                  the newest one of a run
python tools/inspect_checkpoint.py runs/a/iter_0000200 --verify
python tools/inspect_checkpoint.py runs/a --diff runs/b    whatever layouts wrote the two
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_attnres.commands import CommandParser, run_command
from megatron_attnres.errors import InputError
from megatron_attnres.training.checkpoints.folders import newest

if TYPE_CHECKING:
    from megatron_attnres.training.checkpoints.comparison import Comparison, NumberDifference
    from megatron_attnres.training.checkpoints.inspection import Summary

EXIT_STATUS_DIFFERENT = 1
LINES_OF_DIFFERENCES = 20
WIDTH = 100
INDENT = " " * 18


def main(args: Sequence[str]) -> None:
    """Read the flags, inspect, print.

    Raises:
        InputError: a folder without a checkpoint, or a file of it that is missing or damaged.
        SystemExit: two checkpoints differ.
    """
    arguments = _parser().parse_args(args)
    folders = [_find(given) for given in (arguments.checkpoint, arguments.diff) if given]

    from megatron_attnres.training.checkpoints.comparison import compare
    from megatron_attnres.training.checkpoints.inspection import summarise
    from megatron_attnres.training.checkpoints.stored_checkpoint import StoredCheckpoint

    checkpoints = [StoredCheckpoint(folder) for folder in folders]
    if arguments.verify:
        for checkpoint in checkpoints:
            checkpoint.verify()
    summary = summarise(checkpoints[0])
    comparison = compare(*checkpoints) if arguments.diff else None
    if arguments.json:
        print(json.dumps(_as_object(summary, comparison, arguments.verify)))
    else:
        print("\n".join(_lines(summary, comparison, arguments.verify, arguments.tensors)))
    if comparison is not None and not comparison.equal:
        sys.exit(EXIT_STATUS_DIFFERENT)


def _parser() -> CommandParser:
    parser = CommandParser(
        "Print what a checkpoint holds; verify it; compare it with another.",
        epilog="Exit status: 0; 1 when --diff finds that the two differ in state, model, data or "
        "a bit of a tensor (the layouts that wrote them may differ); 2 for bad input, a damaged "
        "file included.",
    )
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="CHECKPOINT",
        help="folder of a checkpoint, or one made by --save: then the checkpoint that its file "
        "latest names",
    )
    add("--tensors", action="store_true", help="list every tensor; --json always does")
    add("--verify", action="store_true", help="compare every file with its SHA-256")
    add("--diff", metavar="OTHER", help="print where OTHER, given like CHECKPOINT, differs")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _find(given: str) -> Path:
    try:
        if not Path(given).is_dir():
            raise InputError("no such folder; give a checkpoint or a folder made by --save")
        return newest(given)
    except InputError as error:
        raise InputError(f"{given}: {error}") from error
    except OSError as error:
        raise InputError(f"{given}: {error.strerror}; give a readable folder") from error


def _as_object(
    summary: "Summary", comparison: "Comparison | None", verified: bool
) -> dict[str, Any]:
    """Always the same keys; null for what was not asked for."""
    diff = comparison and asdict(comparison) | {"equal": comparison.equal}
    return asdict(summary) | {"verified": verified or None, "diff": diff}


def _lines(
    summary: "Summary", comparison: "Comparison | None", verified: bool, with_tensors: bool
) -> Iterator[str]:
    """For people. A comparison comes alone: what both have in common is not what was asked."""
    if comparison is None:
        yield from _summary_lines(summary)
    if with_tensors:
        yield from _tensor_lines(summary)
    if verified:
        yield _line("verified", "whole: every file has the SHA-256 it was written with")
    if comparison is not None:
        yield from _comparison_lines(comparison)


def _summary_lines(summary: "Summary") -> Iterator[str]:
    yield _line("checkpoint", summary.folder)
    for name in ("iteration", "consumed_samples", "tokens", "optimizer_steps"):
        yield _line(name.replace("_", " "), f"{getattr(summary, name):,}")
    yield _line("written by", _layout_text(summary.layout))
    yield _line("plan digest", summary.plan_digest)
    for name in ("model", "data"):
        fields = getattr(summary, name).items()
        yield from _wrapped(name, ", ".join(f"{field}={value}" for field, value in fields))
    counts = summary.parameters
    yield _line("parameters", f"{counts.total:,}")
    yield _line("", f"{counts.weight_decayed:,} in weight-decayed matrices")
    yield _line("", f"{counts.not_decayed:,} not decayed")
    yield _line("", f"{counts.depth_attention:,} of these in depth attention")
    kinds = summary.bytes_by_kind
    yield _line("state", f"{sum(kinds.values()):,} bytes in {len(summary.tensors):,} tensors")
    yield from (_line("", f"{size:,} {kind}") for kind, size in kinds.items())
    yield _line("files", f"{summary.total_bytes:,} bytes in {len(summary.files):,} files")
    yield from (_line("", f"{file.bytes:,} {file.name}") for file in summary.files)


def _layout_text(layout: dict[str, Any]) -> str:
    known = {name: "?" if value is None else value for name, value in layout.items()}
    text = (
        "TP {tensor}, P {pipeline}, V {virtual_pipeline}, DP {data}, ZeRO stage {zero_stage}, "
        "{precision}".format(**known)
    )
    if layout["sequence_parallel"]:
        text += ", sequence parallel"
    if layout["layers_per_chunk"] is not None:
        text += f", layers per chunk {' '.join(map(str, layout['layers_per_chunk']))}"
    return text


def _tensor_lines(summary: "Summary") -> Iterator[str]:
    width = max((len(tensor.name) for tensor in summary.tensors), default=0)
    yield f"{'tensor':<{width}}  {'shape':<16}  {'dtype':<8}  boxes"
    for tensor in summary.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        yield f"{tensor.name:<{width}}  {shape:<16}  {tensor.dtype:<8}  {tensor.boxes:>5}"


def _comparison_lines(comparison: "Comparison") -> Iterator[str]:
    yield _line("one", comparison.one)
    yield _line("other", comparison.other)
    for field in comparison.fields:
        yield f"{field.name}: {field.one} in one, {field.other} in the other"
    for name in comparison.only_in_one:
        yield f"{name}: only in one"
    for name in comparison.only_in_other:
        yield f"{name}: only in the other"
    for pair in comparison.of_other_shape:
        yield f"{pair.name}: {pair.one} in one, {pair.other} in the other"
    yield f"{comparison.bit_equal:,} tensors bit-equal, {len(comparison.different):,} different"
    yield from _difference_lines(comparison.different)
    yield "equal" if comparison.equal else "different"


def _difference_lines(different: "list[NumberDifference]") -> Iterator[str]:
    if not different:
        return
    yield f"{'relative norm':>13}  {'largest':>9}  tensor (worst first)"
    for one in different[:LINES_OF_DIFFERENCES]:
        yield f"{_number(one.relative_norm):>13}  {_number(one.largest):>9}  {one.name}"
    if len(different) > LINES_OF_DIFFERENCES:
        yield f"and {len(different) - LINES_OF_DIFFERENCES:,} more; --json has all"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2e}"


def _line(label: str, text: str) -> str:
    return f"{label:>16}  {text}"


def _wrapped(label: str, text: str) -> Iterator[str]:
    lines = wrap(text, WIDTH - len(INDENT), break_on_hyphens=False) or ["?"]
    yield _line(label, lines[0])
    yield from (_line("", line) for line in lines[1:])


if __name__ == "__main__":
    run_command(main)
