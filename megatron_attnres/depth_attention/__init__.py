"""The depth-attention operator and the state that flows through depth. Knows torch only.

The package is the operator's name as well: ``megatron_attnres.depth_attention(sources, ...)``.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *operands: Any, **options: Any) -> Any:
        """See ``megatron_attnres.depth_attention.operators.depth_attention``."""
        # Resolved on first use: what only computes a plan or checks flags never loads torch.
        from megatron_attnres.depth_attention.operators import depth_attention

        return depth_attention(*operands, **options)


sys.modules[__name__].__class__ = _CallablePackage
