"""Known warnings of dependencies that say nothing to whoever runs a training."""

import warnings


def ignore_known_warnings() -> None:
    """Call before Megatron-Core is imported: it warns of missing fusions at import."""
    # "Transformer Engine and Apex are not installed", deprecated settings that ours do not use.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core\.")
    # Renamed collectives that Megatron-Core and DeepSpeed call by their older names.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
