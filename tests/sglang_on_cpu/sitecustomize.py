"""What SGLang 0.5.23 needs on a machine without a GPU; Python runs this file at the start of every process whose
PYTHONPATH names this folder, SGLang's own included.

PyPI's torchvision is built for CUDA. Beside a torch for CPUs its C++ operators do not load, and it cannot be imported
because it describes two of them to torch, which has never heard of them. Here they get a name, just before.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NamesOperators(importlib.abc.MetaPathFinder):
    """Finds nothing itself; it is asked about each module before that is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            import torch

            if not hasattr(torch.ops.torchvision, "nms"):
                self.library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


_finder = _NamesOperators()
sys.meta_path.insert(0, _finder)
