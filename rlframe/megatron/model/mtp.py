"""The head for multi-token prediction: from the state of token i and the embedding of token i + 1, the logits of token
i + 2 (DeepSeek-V3, arXiv 2412.19437, equations 21 to 23, with one depth; its output layer is the model's).

A module of rlframe's around one of Megatron's layers. Megatron-Core 0.16.1's own takes its next tokens by rolling the
rank's input and has no pass without labels; here the caller says which tokens follow, so that sequences end where they
end under every layout.
"""

import copy
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from rlframe.megatron.cpu.local_layers import WholeLinear
from rlframe.megatron.vocab.frozen_head import multiplied_once


class MtpHead(MegatronModule):
    """The head, without the output layer.

    Args:
        layer: specification of the decoder layer.
        norm: class of the norms of this device.
        layer_number: number, from 1, of the decoder layer to which its own is alike.
    """

    def __init__(self, config: TransformerConfig, layer: ModuleSpec, norm: Any, *, layer_number: int):
        super().__init__(config=config)
        width = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.enorm, self.hnorm = norm(**width), norm(**width)
        self.eh_proj = WholeLinear(2 * config.hidden_size, config.hidden_size, config=config)
        self.transformer_layer = build_module(layer, config=config, layer_number=layer_number)
        self.final_layernorm = norm(**width)

    def forward(self, states: Tensor, embeddings: Tensor, **options: Any) -> Tensor:
        """Returns [T, 1, H] states for the output layer.

        Args:
            states: [T, 1, H] the decoder's, after its final norm.
            embeddings: [T, 1, H] of the tokens that follow.
            options: positions and bounds of the sequences, as Megatron's layers take them.
        """
        joined = torch.cat([self.enorm(embeddings), self.hnorm(states)], dim=-1)
        hidden, _ = self.eh_proj(joined)
        hidden, _ = self.transformer_layer(hidden_states=hidden, attention_mask=None, **options)
        return self.final_layernorm(hidden)


class ModelWithMtp(GPTModel):
    """A language model whose last stage has the head."""

    mtp_head: MtpHead
    detach: bool = True
    """See MtpConfig.detach."""

    def _postprocess(self, hidden_states: Tensor, *, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Returns what the model without the head returns; on the last stage, with `labels`, the tokens that follow,
        also the head's logits: both [1, T, V_local]."""
        output = super()._postprocess(hidden_states=hidden_states, labels=None, **inputs)
        if labels is None or not self.post_process:
            return output
        embeddings = self.embedding(input_ids=labels, position_ids=None)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if self.detach:
            hidden_states, embeddings, weight = hidden_states.detach(), embeddings.detach(), weight.detach()
        options = {
            key: inputs[key] for key in ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        }
        states = self.mtp_head(hidden_states, embeddings, **options)
        logits, _ = self.output_layer(states, weight=weight)
        if self.detach:
            logits = multiplied_once(logits)
        return output, logits.transpose(0, 1).contiguous()


def unbalanced(config: TransformerConfig) -> TransformerConfig:
    """Returns the configuration of the head's layer: one pipeline stage, and no losses or replay of routers, which
    belong to the decoder's."""
    config = copy.copy(config)
    config.pipeline_model_parallel_size = 1
    config.virtual_pipeline_model_parallel_size = None
    config.pipeline_model_parallel_layout = None
    config.moe_router_load_balancing_type = "none"
    config.moe_aux_loss_coeff, config.moe_z_loss_coeff = 0.0, None
    return config


def decoder_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the modules inside `module` that are not part of a head for multi-token prediction."""
    heads = [each for each in module.modules() if isinstance(each, MtpHead)]
    apart = {id(each) for head in heads for each in head.modules()}
    return [each for each in module.modules() if id(each) not in apart]
