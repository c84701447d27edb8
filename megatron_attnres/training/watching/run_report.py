"""How runs stand, in lines for a terminal. Pure, no torch."""

import time
from collections.abc import Iterator, Sequence

from megatron_attnres.text_table import table_lines
from megatron_attnres.training.watching.run_state import PARTS, RunState

LAST_ALARMS = 5
INDENT = " " * 18
TABLE_HEADER = ("run", "state", "iteration", "loss", "validation", "tokens/s", "MFU", "alarms")
TEXT_COLUMNS = 2


def run_lines(state: RunState, all_alarms: bool = False) -> Iterator[str]:
    """A run for people.

    Args:
        state: the run.
        all_alarms: more than the last ``LAST_ALARMS``.
    """
    yield f"{state.name}: {_headline(state)}"
    if state.iteration is not None:
        yield from _iteration_lines(state)
    if state.remaining_seconds is not None:
        yield _line("remaining", f"about {duration(state.remaining_seconds)}")
    if state.checkpoint is not None:
        yield _line(
            "checkpoint", f"after iteration {state.checkpoint_iteration}: {state.checkpoint}"
        )
    skipped = f", {_count(state.skipped_steps, 'update')} skipped" if state.skipped_steps else ""
    lost = f", {state.lost} of them without an end" if state.lost else ""
    so_far = f"{_count(state.starts, 'start')}{lost}, {_count(state.failures, 'failure')}{skipped}"
    yield _line("so far", so_far)
    yield from alarm_lines(state, None if all_alarms else LAST_ALARMS)
    if state.state in ("failed", "gave up") and state.failure is not None:
        yield _line("failure", f"{moment(state.failure['time'])}")
        yield from (INDENT + line for line in state.failure["message"].splitlines())


def alarm_lines(state: RunState, most: int | None) -> Iterator[str]:
    """The last alarms of a run, ``most`` of them at most, the oldest first."""
    shown = state.alarms if most is None else state.alarms[-most:]
    which = "" if len(shown) == len(state.alarms) else f", the last {len(shown)}"
    yield _line("alarms", f"{len(state.alarms):,}{which}" if state.alarms else "none")
    for alarm in shown:
        first = (alarm["message"].splitlines() or [""])[0]
        yield f"{INDENT}{moment(alarm['time'])}  {alarm['kind']:<13}  {first}"


def runs_table(states: Sequence[RunState]) -> Iterator[str]:
    """Several runs for people, a line each."""
    rows = [TABLE_HEADER, *(_row(state) for state in states)]
    yield from table_lines(rows, TEXT_COLUMNS)


def duration(seconds: float) -> str:
    """In its two largest units."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = ((days, "d"), (hours, "h"), (minutes, "min"), (whole_seconds, "s"))
    first = next((index for index, (count, _) in enumerate(units) if count), len(units) - 1)
    return " ".join(f"{count:,} {unit}" for count, unit in units[first : first + 2])


def moment(seconds: float) -> str:
    """A time since the epoch, on the clock of whoever looks."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _headline(state: RunState) -> str:
    parts = [state.state]
    if state.iteration is not None:
        parts.append(f"iteration {_progress(state)}")
    if state.state == "running" and state.ranks:
        parts.append(_count(state.ranks, "rank"))
        if state.silent_ranks:
            first = " ".join(map(str, state.silent_ranks[:8]))
            more = " ..." if len(state.silent_ranks) > 8 else ""
            parts.append(f"no heartbeat of {len(state.silent_ranks)} of them: {first}{more}")
    if state.quiet_seconds is not None:
        parts.append(f"last heard of {duration(state.quiet_seconds)} ago")
    return ", ".join(parts)


def _progress(state: RunState) -> str:
    if state.iteration is None:
        return "-"
    of = f" of {state.train_iters:,}" if state.train_iters is not None else ""
    return f"{state.iteration:,}{of}"


def _iteration_lines(state: RunState) -> Iterator[str]:
    yield _line("loss", _loss_text(state))
    yield _line("tokens", f"{_text(state.tokens, ',')} so far")
    if state.tokens_per_second is not None:
        yield _line("speed", _speed_text(state))
    if state.step_seconds is not None:
        yield from _step_lines(state, state.step_seconds)
    if state.peak_memory_bytes is not None:
        gib = state.peak_memory_bytes / 2**30
        yield _line("memory", f"{gib:.2f} GiB at its peak, on the rank that uses most")


def _loss_text(state: RunState) -> str:
    text = _text(state.lm_loss, ".4f")
    if state.validation_loss is not None:
        after = f"after iteration {state.validation_iteration:,}"
        text += f", validation {state.validation_loss:.4f} {after}"
    return f"{text}, gradient norm {_text(state.grad_norm, '.4g')}"


def _speed_text(state: RunState) -> str:
    per_rank = _text(state.tokens_per_second_per_rank, ",.0f")
    parts = [f"{state.tokens_per_second:,.0f} tokens a second, {per_rank} per rank"]
    if state.model_tflops_per_rank is not None:
        parts.append(f"{state.model_tflops_per_rank:.3g} TFLOP/s per rank")
    if state.mfu is not None:
        parts.append(f"MFU {state.mfu:.1%}")
    return f"{', '.join(parts)}, {_of_window(state)}"


def _step_lines(state: RunState, step: float) -> Iterator[str]:
    yield _line("step", f"{_milliseconds(step)}, {_of_window(state)}")
    if step > 0 and state.step_parts:
        shown = [
            f"{PARTS.get(name, 'rest')} {_milliseconds(seconds)} ({seconds / step:.0%})"
            for name, seconds in state.step_parts.items()
        ]
        yield _line("of it", ", ".join(shown))


def _of_window(state: RunState) -> str:
    return f"median of {_count(state.window, 'iteration')}"


def _row(state: RunState) -> tuple[str, ...]:
    return (
        state.name,
        state.state,
        _progress(state),
        _text(state.lm_loss, ".4f"),
        _text(state.validation_loss, ".4f"),
        _text(state.tokens_per_second, ",.0f"),
        _text(state.mfu, ".1%"),
        f"{len(state.alarms):,}",
    )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _text(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def _count(count: float, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _line(label: str, text: str) -> str:
    return f"{label:>16}  {text}"
