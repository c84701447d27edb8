"""Which sequences are generated together. Pure, no torch."""

from collections.abc import Sequence


def batches_of(lengths: Sequence[int], batch_size: int, most_forced: int) -> list[tuple[int, ...]]:
    """Put sequences of like lengths together.

    A batch takes as many tokens at once as its shortest prompt has, and the rest of longer ones
    step by step. Those steps are worth it only while another batch would take more of them.

    Args:
        lengths: tokens of each prompt.
        batch_size: sequences of a batch, at most.
        most_forced: the most that two lengths in a batch may differ.

    Returns:
        Indices of the sequences of each batch, the longest prompts first: what needs the most
        memory shows at once.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        last = batches[-1] if batches else None
        fits = last is not None and lengths[last[0]] - lengths[index] <= most_forced
        if fits and len(last) < batch_size:
            last.append(index)
        else:
            batches.append([index])
    return [tuple(batch) for batch in batches]
