"""What SGLang 0.5.23 needs on a machine without a GPU; Python runs this file at the start of every process whose
PYTHONPATH names this folder, SGLang's own included.

PyPI's torchvision is built for CUDA. Beside a torch for CPUs its C++ operators do not load, and it cannot be imported
because it describes two of them to torch, which has never heard of them. Here they get a name, just before.

And the memory in which SGLang keeps routed experts is registered with CUDA wherever it is. Here it is not, from just
before the module is imported that asks for it.
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


class _LeavesMemory(importlib.abc.MetaPathFinder):
    """Finds nothing itself; it is asked about each module before that is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "sglang.srt.state_capturer.base":
            sys.meta_path.remove(self)
            from sglang.srt.mem_cache.pool_host import common

            common._cuda_host_register = lambda *arguments: None
        return None


# The names last as long as the finder that gave them.
_finders = [_NamesOperators(), _LeavesMemory()]
sys.meta_path[:0] = _finders
