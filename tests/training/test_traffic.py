"""The table of DESIGN section 3, counted on real ranks where four are enough."""

import pytest
import torch
from torch import distributed

from megatron_attnres.parallel.layout import ParallelLayout
from tests.distributed import restart_job, run_ranks
from tests.layouts import Case, build, run_step, small_model

MICROBATCHES = 4
# layers, S, P, V: naive, cached, of these critical, relayed
ROWS = {
    (8, 4, 4, 2): (23, 15, 8, 7),
    (8, 4, 4, 1): (9, 9, 4, 5),
    (8, 2, 2, 2): (15, 7, 7, 0),
    (16, 4, 4, 4): (79, 31, 16, 15),
}


def entries_sent(rows: list[tuple[int, int, int, int]], policy: str) -> list[dict]:
    """Runs on every rank: entries per micro-batch by (direction, lane), summed over all ranks."""
    counted = []
    for layers, block_size, pipeline, virtual in rows:
        model = small_model(layers, block_size=block_size)
        case = Case(model, ParallelLayout(1, pipeline, virtual), MICROBATCHES, policy=policy)
        groups, step = build(case, torch.float32)
        sent = run_step(case, groups, step).traffic.bytes_sent
        everyone: list[dict] = [{}] * distributed.get_world_size()
        distributed.all_gather_object(everyone, sent)
        entry = model.seq_length * case.micro_batch_size * model.hidden_size * 4 * MICROBATCHES
        sums: dict[tuple[str, str], float] = {}
        for one in everyone:
            for (direction, _, lane), size in one.items():
                sums[direction, lane] = sums.get((direction, lane), 0) + size / entry
        counted.append(sums)
        restart_job()
    return counted


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_row_is_what_the_ranks_send(world_size):
    rows = [row for row in ROWS if row[2] == world_size]
    naive = run_ranks(entries_sent, world_size, rows, "naive")[0]
    cached = run_ranks(entries_sent, world_size, rows, "cached")[0]
    for row, by_naive, by_cached in zip(rows, naive, cached, strict=True):
        all_naive, all_cached, critical, relayed = ROWS[row]
        for direction in ("forward", "backward"):
            sent = [size for (way, _), size in by_naive.items() if way == direction]
            assert sum(sent) == all_naive, row
            assert by_cached[direction, "critical"] == critical, row
            assert by_cached.get((direction, "relay"), 0) == relayed, row
            assert critical + relayed == all_cached
