"""Where the releases of Megatron-Core differ: 0.16, the newest for Python 3.11, and 0.19, the newest for Python 3.12.

Only this file knows of both. Each function says what 0.16 does, what 0.19 does, and what takes its place when 0.16
goes, with Python 3.11.
"""

from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version

IS_0_16 = Version(version("megatron-core")) < Version("0.17")


def name_after_torch() -> None:
    """Makes tensors in messages loadable without Megatron. Must be called before this process pickles one.

    0.19 puts a function of its own, which loads plain tensors only, in the place of `torch.storage._load_from_bytes`
    (`megatron/core/__init__.py`). Pickled tensors name it, so that every process that gets one, the driver too, would
    import all of Megatron. Under torch's name each process loads them with the function that it has. 0.16 has no such
    function, and nothing happens. Not needed any more once pickles of tensors in a process with Megatron do not name
    it.
    """
    load: Any = torch.storage._load_from_bytes
    load.__module__, load.__qualname__ = "torch.storage", "_load_from_bytes"


def submodules(spec: Any) -> Any:
    """Returns the submodules of a part of a layer's specification.

    0.16 has a ModuleSpec for each part. 0.19 has a `functools.partial` for an MLP and for its experts. Replaced later
    by `megatron.core.transformer.spec_utils.get_submodules`, which 0.16 lacks.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def auxiliary_loss_divisor(config: Any) -> int:
    """Returns the number by which routers divide the gradient of their auxiliary losses.

    With `calculate_per_token_loss`, 0.16 gives the loss on a rank the number of the rank's own tokens as its gradient,
    which is that of a micro-batch divided by the ranks that share it (TP x CP). 0.19 multiplies by these ranks
    (`attach_and_log_load_balancing_loss`). Replaced later by 1.
    """
    return config.tensor_model_parallel_size * config.context_parallel_size if IS_0_16 else 1


class LatentAttention(MLASelfAttention):
    """Latent attention with the projections and norms of its specification.

    0.16 builds what the specification names. 0.19 replaces a query projection that has no latent vector before it
    (`q_lora_rank` null, Moonlight) by one with a norm in front, which no such model has
    (`QKNormConfigResolver._resolve_mla_qk_layernorm`), and refuses it without Transformer Engine. Not needed any more
    once a model without `q_lora_rank` loads without this class.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
