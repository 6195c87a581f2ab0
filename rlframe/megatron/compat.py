"""Where Megatron-Core's releases differ: 0.16, the newest for Python 3.11, and 0.19, the newest for Python 3.12.

Each function has both ways, and says with which releases one of them can go. All other code of rlframe is the same for
both.
"""

from functools import partial
from typing import Any


def submodules(spec: Any) -> Any:
    """Returns the submodules of a part of a layer's specification.

    0.16 has a ModuleSpec for each part. Later releases have a `functools.partial` for an MLP, its experts and its
    shared experts; they have `megatron.core.transformer.spec_utils.get_submodules`, which does the same as this
    function and takes its place when 0.16 goes.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
