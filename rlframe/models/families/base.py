"""The interface of a model family: its architecture, its checkpoint, and how the checkpoint fills Megatron
parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault


@dataclass(frozen=True, kw_only=True, slots=True)
class MLADimensions:
    """Multi-head latent attention: queries, keys and values come from narrow vectors (DeepSeek-V2, arXiv
    2405.04434)."""

    query_rank: int | None
    """Width of the query's vector. None if queries come directly from the hidden state."""
    kv_rank: int
    """Width of the vector that keys and values share."""
    plain_head_dim: int
    """Dimensions of a query or key head without positions."""
    rotary_head_dim: int
    """Dimensions with rotary positions. All key heads share theirs."""
    value_head_dim: int
    norm_eps: float
    """Epsilon of the norms of the narrow vectors, which is not that of the other norms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexerDimensions:
    """Sparse attention: an indexer of few narrow heads chooses the keys that each query sees (DeepSeek-V3.2, arXiv
    2512.02556). Its weights are not trained."""

    num_heads: int
    head_dim: int
    top_k: int
    """Number of keys that a query sees at most."""
    interleaved: bool
    """Whether rotary positions pair neighbouring dimensions, instead of the halves of the rotary part of a head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClampedGlu:
    """Experts compute (up + 1) * gate * sigmoid(alpha * gate), with gate and up clamped, in rows gate, up, gate, ..."""

    alpha: float
    limit: float
    """Upper bound of the gate, and bound of the absolute value of up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryScaling:
    """Queries late in a sequence are multiplied by 1 + strength * log(1 + floor((position + shift) / tokens)), so that
    attention over many tokens stays sharp (scalable softmax, arXiv 2501.19399)."""

    strength: float
    tokens: int
    shift: int = 0
    """Number added to positions, which count from 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNetDimensions:
    """Gated delta net, attention with a state instead of keys and values (Yang et al. 2024, arXiv 2412.06464)."""

    num_key_heads: int
    """Number of query heads, and of key heads. Each serves as many consecutive value heads."""
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    """Number of tokens that the convolution of queries, keys and values sees, the token's own included."""

    @property
    def values_per_key(self) -> int:
        """Number of value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def conv_channels(self) -> int:
        """Number of channels of the convolution that belong to one key head: its query, its key, its values."""
        return 2 * self.key_head_dim + self.values_per_key * self.value_head_dim

    @property
    def projected(self) -> int:
        """Number of inputs of one key head: the convolution's, the gates of its values, and two numbers for each value
        head, of which the one sets how much it learns of a token and the other how much it forgets."""
        return self.conv_channels + self.values_per_key * (self.value_head_dim + 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """The architecture of a decoder-only model, independent of its family."""

    model_type: str
    """Hugging Face's name of the family."""
    hidden_size: int
    """Hidden size H."""
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a query or key head."""
    ffn_hidden_size: int
    """Width of a dense layer's MLP."""
    vocab_size: int
    """Vocabulary size V, without padding."""
    max_positions: int
    """Greatest number of tokens of a sequence."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    """Scaling of rotary positions, or None: the rule named by rope_type with its numbers, `linear` (factor), `llama3`
    (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) or `yarn` (factor,
    original_max_position_embeddings, beta_fast, beta_slow, mscale and mscale_all_dim, which may be None, and
    truncate)."""
    rotary_percent: float = 1.0
    """Fraction of each head that has rotary positions: its first dimensions."""
    rope_interleaved: bool = False
    """Whether neighbouring dimensions of a head are rotated together, instead of its halves."""
    window_rope_theta: float | None = None
    """The rope_theta, without scaling, of the layers of `window_layers`. None if their positions are those of all."""
    no_rope_layers: tuple[bool, ...] = ()
    """[num_layers] True for layers without rotary positions. Empty if all have them."""
    query_scaling: QueryScaling | None = None
    """Scaling of queries by position: in `no_rope_layers` if there are any, otherwise in all layers."""
    tie_embeddings: bool = False
    """Whether the output layer is the embedding, so that the checkpoint has no lm_head.weight."""
    num_outputs: int | None = None
    """Number of outputs C of the linear layer HEAD, without bias, that replaces the output layer. None if the output
    layer gives logits over the vocabulary, 0 if there is no output layer. It is not read from config.json, but follows
    from what is trained."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether query and key heads pass an RMSNorm of width head_dim."""
    qk_l2_norm: bool = False
    """Whether query and key heads are divided by their root mean square in the layers that have positions."""
    whole_qk_norm: bool = False
    """Whether the norms of `qk_norm` see all query heads, or all key heads, of a token together."""
    softmax_scale: float | None = None
    """Factor of the products of queries and keys. None for the root of 1 / head_dim."""
    norm_before: bool = True
    """Whether attention and MLP get their input through a norm."""
    norm_after: bool = False
    """Whether the output of attention and MLP passes a norm before it is added to the residual stream."""
    gelu: bool = False
    """Whether the MLP's gate passes gelu, in its tanh approximation, instead of silu."""
    embedding_scale: float = 1.0
    """Factor of the embeddings as inputs of the first layer."""
    round_embedding_scale: bool = False
    """Whether `embedding_scale` is first rounded to the number format of the embeddings."""
    residual_scale: float = 1.0
    """Factor of the output of attention and MLP where it is added to the residual stream."""
    logits_divisor: float = 1.0
    """Divisor of the logits, by which the states before the output layer are divided."""
    latent: MLADimensions | None = None
    """Multi-head latent attention, or None if the attention is not latent."""
    indexer: IndexerDimensions | None = None
    """The indexer of each layer, or None if queries see all keys."""
    sliding_window: int = 0
    """Number of tokens that a query sees in the layers of `window_layers`, its own included. 0 if no layer has a
    window."""
    window_layers: tuple[bool, ...] = ()
    """[num_layers] True for layers whose attention has the window. Empty if none has."""
    attention_chunk: int = 0
    """Number of tokens of a chunk of a sequence: in the layers of `chunk_layers` a query sees those of its own chunk. 0
    if no layer has chunks."""
    chunk_layers: tuple[bool, ...] = ()
    """[num_layers] True for layers whose attention has chunks. Empty if none has."""
    sinks: bool = False
    """Whether each head has a learned logit that takes part in the softmax and has no value."""
    output_gate: bool = False
    """Whether each query head has a gate, a vector of width head_dim whose sigmoid multiplies the head's output."""
    gated_delta_net: GatedDeltaNetDimensions | None = None
    """The attention of `gated_delta_layers`, or None if all layers have keys and values."""
    gated_delta_layers: tuple[bool, ...] = ()
    """[num_layers] True for layers with a gated delta net. Empty if none has."""
    zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight. The norm inside a gated delta net multiplies by its weight."""
    linear_bias: bool = False
    """Whether the projection back to H, the router and the experts have biases."""
    num_experts: int = 0
    """Number of experts E of a MoE layer. 0 for a dense model."""
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    """Width of one expert."""
    norm_topk_prob: bool = True
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    sigmoid_router: bool = False
    """Whether scores are sigmoids instead of a softmax over the experts."""
    router_bias: bool = True
    """Whether a router with sigmoids has a bias per expert that is added for the choice only. It is float32 and not
    trained (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16)."""
    scores_on_input: bool = False
    """Whether the score of a token's one expert multiplies the input of the expert instead of its output."""
    router_groups: int = 1
    """Number of groups of experts. A token first chooses `router_groups_per_token` of them."""
    router_groups_per_token: int = 1
    router_scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    shared_ffn_hidden_size: int = 0
    """Width of the expert that sees every token. 0 if there is none."""
    shared_expert_gate: bool = False
    """Whether the output of the expert that sees every token is multiplied by the sigmoid of one number of the
    token."""
    clamped_glu: ClampedGlu | None = None
    """The activation that replaces silu(gate) * up in experts, or None."""
    moe_layers: tuple[bool, ...] = ()
    """[num_layers] True for layers that have experts instead of a dense MLP."""
    mtp_layers: int = 0
    """Number of layers for multi-token prediction that config.json promises behind the others (DeepSeek-V3, arXiv
    2412.19437, section 2.2). Files that transformers wrote have none."""
    with_mtp: bool = False
    """Whether the model has the first of `mtp_layers`. It is not read from config.json, but follows from train.mtp."""

    def with_outputs(self, num_outputs: int | None) -> "Architecture":
        """Returns the same layers with another output layer, which is then not tied to the embedding."""
        if num_outputs is None:
            return self
        return replace(self, num_outputs=num_outputs, tie_embeddings=False, with_mtp=False)

    def keeping_mtp(self, keep: bool) -> "Architecture":
        """Returns the same model with its head for multi-token prediction, if `keep` and if it has one."""
        return replace(self, with_mtp=True) if keep and self.mtp_layers and self.num_outputs is None else self

    @property
    def layer_of_mtp(self) -> int:
        """Number of the layer to which the layer of the head for multi-token prediction is alike: the last one with
        keys and values."""
        return max(layer for layer in range(self.num_layers) if not self.has_gated_delta_net(layer))

    def has_gated_delta_net(self, layer: int) -> bool:
        """Returns whether layer number `layer` has a gated delta net instead of keys and values."""
        return bool(self.gated_delta_layers) and self.gated_delta_layers[layer]

    def seen_tokens(self, layer: int, length: float) -> float:
        """Returns the mean number of tokens that a query of layer number `layer` sees in a sequence of `length`
        tokens."""
        if self.window_layers and self.window_layers[layer]:
            return min(length / 2, self.sliding_window)
        if self.chunk_layers and self.chunk_layers[layer]:
            return min(length, self.attention_chunk) / 2
        return length / 2

    def faults(
        self, *, tp: int, ep: int, etp: int, cp: int = 1, communication: str | None = None, dynamic: bool = False
    ) -> list[Fault]:
        """Returns a fault for every reason why a parallel layout does not fit this model's layers. `shards.faults`
        collects all of them.

        Args:
            communication: `train.context_parallel.communication`; None means one that fits.
            dynamic: `train.context_parallel.dynamic`.
        """
        divisions = [
            ("tp", tp, "num_attention_heads", self.num_attention_heads),
            ("tp", tp, "num_kv_heads", self.num_kv_heads),
        ]
        if net := self.gated_delta_net:
            # With context parallelism a rank has the whole sequences of a part of its heads.
            divisions.append(("tp * cp", tp * cp, "linear_num_key_heads", net.num_key_heads))
        faults = []
        if not all(self.moe_layers):
            divisions.append(("tp", tp, "ffn_hidden_size", self.ffn_hidden_size))
        if self.num_experts:
            divisions.append(("tp", tp, "shared_ffn_hidden_size", self.shared_ffn_hidden_size))
            divisions.append(("ep", ep, "num_experts", self.num_experts))
            divisions.append(("etp", etp, "expert_ffn_hidden_size", self.expert_ffn_hidden_size))
        else:
            faults = [
                Fault(
                    "train.parallel",
                    said=f"{axis} {size} needs experts, and {self.model_type} is dense: leave {axis} at 1",
                )
                for axis, size in (("ep", ep), ("etp", etp))
                if size > 1
            ]
        if self.linear_bias and etp > 1:
            faults.append(
                Fault(
                    "train.parallel",
                    said=f"etp {etp} cannot split the experts of {self.model_type}, which have biases: "
                    "Megatron-Core 0.16.1 would add the bias on every rank; use ep",
                )
            )
        if cp > 1:
            faults += self._context_faults(tp=tp, cp=cp, communication=communication)
            if dynamic and self.latent:
                faults.append(
                    Fault(
                        "train.context_parallel.dynamic",
                        f"must be false for {self.model_type}",
                        got="true",
                        why="Megatron-Core's latent attention takes no group of its own for a micro-batch",
                        hint="remove it",
                    )
                )
        return faults + [
            Fault("train.parallel", said=f"{axis} {size} must divide {name} {value} of {self.model_type}")
            for axis, size, name, value in divisions
            if value % size
        ]

    def _context_faults(self, *, tp: int, cp: int, communication: str | None) -> Iterator[Fault]:
        """Yields the reasons why `cp` ranks cannot share the sequences of this model with that communication."""
        key = "train.context_parallel.communication"
        for what, found in {"has chunks": any(self.chunk_layers), "is sparse": bool(self.indexer)}.items():
            if found:
                yield Fault(
                    "train.parallel",
                    said=f"cp {cp} cannot split the sequences of {self.model_type}, whose attention {what}: use tp",
                )
        local = bool(self.sinks) or any(self.window_layers)
        if local and communication not in (None, "a2a"):
            yield Fault(
                key,
                f"must be a2a with cp {cp} for {self.model_type}",
                got=communication,
                why="its attention has sliding windows or sinks, for which a rank needs whole sequences of its heads",
                hint="or use tp",
            )
        elif local or communication == "a2a":
            heads = {"num_attention_heads": self.num_attention_heads, "num_kv_heads": self.num_kv_heads}
            for name in (name for name, count in heads.items() if count % (tp * cp)):
                yield Fault(
                    key,
                    f"needs tp {tp} * cp {cp} to divide {name} {heads[name]} of {self.model_type}",
                    got="a2a",
                    hint="use a smaller cp" if local else "use p2p",
                    stated=True,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The part of the model that a chunk of a rank holds."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    etp_rank: int = 0
    etp_size: int = 1
    first_layer: int = 0
    """Global index of the first layer of this chunk."""
    num_layers: int
    """Number of consecutive layers of this chunk. A pipeline rank has one chunk, or several with an interleaved
    schedule."""
    has_embedding: bool = True
    has_output: bool = True
    """Whether the chunk holds the final norm, and the output layer if that exists and has a parameter of its own."""
    padded_vocab_size: int
    """V rounded up to a multiple of TP."""


class Family(ABC):
    """A Hugging Face model type. A file of this folder ends `FAMILY = TheFamily()`."""

    @abstractmethod
    def architecture(self, hf: Mapping[str, Any]) -> Architecture:
        """Returns the architecture that `hf`, the content of config.json, describes.

        Raises:
            ConfigError: `hf` has settings that would be computed wrongly; each is named.
        """

    @abstractmethod
    def tensors(self, architecture: Architecture) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every tensor of the Hugging Face checkpoint, named as on disk, in the order of the
        model."""

    @abstractmethod
    def parameters(self, architecture: Architecture, shard: Shard) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every Megatron parameter of a rank with this shard, by its name in `load`."""

    @abstractmethod
    def load(
        self,
        parameters: Mapping[str, Tensor],
        checkpoint: Mapping[str, Tensor],
        architecture: Architecture,
        shard: Shard,
    ) -> None:
        """Fills one rank's parameters. Uses only views, `copy_` and `zero_`, so that it can be recorded.

        Args:
            parameters: by Megatron's local-spec name, with layers and experts counted from 0 on this rank.
            checkpoint: full Hugging Face tensors by name.
        """


def faults_to_error(hf: Mapping[str, Any], faults: list[str]) -> None:
    """Raises ConfigError with `faults`, each a clause such as `attention_bias is true`, if there are any."""
    if faults:
        raise ConfigError([Fault("model.path", said=f"config.json of {hf['model_type']}: {fault}") for fault in faults])
