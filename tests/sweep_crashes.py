"""Kill a random rank at random moments of a run that saves every three iterations; always go on.

python tests/sweep_crashes.py --rounds 30

Every restart takes ``--load auto``; the metrics of the patched-up run must be those of an
uninterrupted one, to the last bit. The moments include saves: the report says what was being
written at each kill.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.training.checkpoints.crashes import crash_rounds, resumable_flags, whole_run


def main() -> None:
    """Sweep and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="ranks to kill")
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Every round gets two to five iterations further than the last save.
        flags = resumable_flags(folder) | {"train-iters": 3 * arguments.rounds}
        _, expected = whole_run(folder, flags)
        told = crash_rounds(folder, flags, expected, arguments.rounds, arguments.seed)
    for line in told:
        print(line)
    during = sum("writing []" not in line for line in told)
    print(f"{len(told)} kills, {during} of them during a save; metrics equal to the last bit")


if __name__ == "__main__":
    main()
