"""Differences between the releases of Megatron-Core: 0.16, the newest for Python 3.11, and 0.19, the newest for 3.12.

All other code of rlframe is the same for both. Each entry says what either release does, where upstream changed it, and
when it can go: most of them with 0.16, and so with Python 3.11.
"""

from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from packaging.version import Version

IS_0_16 = Version(version("megatron-core")) < Version("0.17")


def name_after_torch() -> None:
    """Makes tensors in messages loadable without Megatron. Must be called before this process pickles one.

    0.19 puts a function of its own, which loads plain tensors only, in the place of `torch.storage._load_from_bytes`
    (https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/safe_globals.py). Pickled tensors name it, so that
    every process that receives one, the driver too, would import all of Megatron. Under torch's name each process loads
    tensors with the function that it has itself. 0.16 has no such function, and nothing changes. Can go when a tensor
    that is pickled beside Megatron does not name it.
    """
    load: Any = torch.storage._load_from_bytes
    load.__module__, load.__qualname__ = "torch.storage", "_load_from_bytes"


def submodules(spec: Any) -> Any:
    """Returns the submodules of a part of a layer's specification.

    0.16 has a ModuleSpec for each part. 0.19 has a `functools.partial` for an MLP and for its experts
    (https://github.com/NVIDIA/Megatron-LM/pull/3435). Can go with 0.16: then
    `megatron.core.transformer.spec_utils.get_submodules` does the same.
    """
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def auxiliary_loss_divisor(config: TransformerConfig) -> int:
    """Returns the number by which routers divide the gradients of their auxiliary losses.

    With `calculate_per_token_loss`, 0.16 weights the loss with the number of the rank's own tokens, which are those of
    the micro-batch divided by the ranks that share it (TP x CP). 0.19 multiplies by these ranks
    (https://github.com/NVIDIA/Megatron-LM/pull/5047). Can go with 0.16: then it is 1.
    """
    return config.tensor_model_parallel_size * config.context_parallel_size if IS_0_16 else 1


class LatentAttention(MLASelfAttention):
    """Latent attention with the projections and norms that its specification names.

    0.16 builds these. 0.19 (https://github.com/NVIDIA/Megatron-LM/pull/4452) puts a norm that no such model has into a
    query projection without a latent vector (`q_lora_rank` null, as in Moonlight), and refuses one without Transformer
    Engine; others met it too (https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/5261). Can go when a model without
    `q_lora_rank` loads without this class.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}
