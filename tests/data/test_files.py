"""Files that appear whole or not at all, and what is no file."""

import os
from threading import Thread

from megatron_attnres.data.files import written_at_once


def test_a_link_leads_to_the_file_and_stays(tmp_path):
    link, target = tmp_path / "link", tmp_path / "elsewhere" / "target"
    target.parent.mkdir()
    link.symlink_to(target)
    for text in ("new", "newer"):
        with written_at_once(link) as path:
            path.write_text(text)
        assert link.is_symlink()
        assert target.read_text() == text
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with written_at_once(pipe) as path:
        path.write_text("text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()
