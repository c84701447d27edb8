"""Files that appear whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_attnres.errors import InputError


@contextmanager
def written_at_once(*targets: Path) -> Iterator[Path]:
    """Give a temporary path to write to; move what was written to ``targets`` at the end.

    With one target the path stands for it. With several, which must share a folder, the path is
    that of the first without its suffix, and every target is expected under its own suffix. After
    an exception, an interrupt included, the targets are as they were and nothing else is left.

    A single target may be a link, which stays one, or a device or pipe, which is written to itself.

    Raises:
        InputError: the folder cannot be made or written, or a target is a folder.
    """
    for target in targets:
        if target.is_dir():
            raise InputError(f"output {target}: a folder of that name exists; give another name")
    if len(targets) == 1:
        if targets[0].exists() and not targets[0].is_file():
            yield targets[0]
            return
        targets = (Path(os.path.realpath(targets[0])),)
    folder = targets[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Beside the targets: a move within one file system only renames.
        temporary = TemporaryDirectory(dir=folder, prefix=f".{targets[0].name}-")
    except OSError as error:
        raise InputError(
            f"output {targets[0]}: {error.strerror}; a folder that can be written is needed"
        ) from None
    with temporary as name:
        if len(targets) == 1:
            written = [Path(name, targets[0].name)]
            yield written[0]
        else:
            stem = Path(name, targets[0].stem)
            written = [Path(name, stem.name + target.suffix) for target in targets]
            yield stem
        # The last target goes first and comes last, so that an old one never stands beside new
        # ones if the power fails in between.
        if len(targets) > 1:
            targets[-1].unlink(missing_ok=True)
        for source, target in zip(written, targets, strict=True):
            source.replace(target)
