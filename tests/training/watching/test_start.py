"""Whether another start of a run is alive."""

import threading
import time

from megatron_attnres.training.watching.rank_record import write_record
from megatron_attnres.training.watching.run_folder import RunFolder
from megatron_attnres.training.watching.start import rank_that_lives
from tests.training.watching.records import record


def test_a_start_that_was_killed_is_not_alive(tmp_path):
    folder = RunFolder(tmp_path)
    assert rank_that_lives(folder, 5.0) is None
    folder.make()
    write_record(folder.record(0), record(0, state="ended"))
    begin = time.monotonic()
    assert rank_that_lives(folder, 5.0) is None
    assert time.monotonic() - begin < 1, "nothing to wait for"
    write_record(folder.record(1), record(1))
    assert rank_that_lives(folder, 0.5) is None


def test_a_start_that_beats_is_alive(tmp_path):
    folder = RunFolder(tmp_path)
    folder.make()
    write_record(folder.record(0), record(0))
    write_record(folder.record(1), record(1, beat=1.0))
    beat = threading.Timer(0.4, write_record, (folder.record(1), record(1, beat=2.0)))
    beat.start()
    assert rank_that_lives(folder, 10.0) == record(1, beat=2.0)
    beat.join()
