"""A fingerprint of the order of samples, to tell whether a resumed run goes on with the same one.

Megatron-Core shuffles all epochs that a run will take together, so another number of iterations
can mean another order from the first sample on.
"""

from hashlib import sha256

from torch.utils.data import Dataset

_LOOKED_AT = 32


def order_digest(dataset: Dataset, samples: int) -> str:
    """SHA-256 of some of the first ``samples`` samples' tokens, evenly spaced, ends included."""
    digest = sha256()
    if samples > 0:
        looked_at = min(samples, _LOOKED_AT)
        for index in range(looked_at):
            place = index * (samples - 1) // max(1, looked_at - 1)
            digest.update(dataset[place]["tokens"].numpy().tobytes())
    return digest.hexdigest()
