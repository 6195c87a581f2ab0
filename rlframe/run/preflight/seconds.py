"""Seconds of a step by phase: a roofline with measured efficiencies.

Source of the operations: examples/benchmarks/train_step.py (real tokens, causal attention, forward and twice that for
backward); of the model of a decode step: examples/benchmarks/engines.py. `constants` says where the rest was measured.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rlframe.megatron.config.mtp import MtpConfig
from rlframe.megatron.config.optimizer import OptimizerName
from rlframe.megatron.config.options import ContextCommunication, Dispatcher, Fp8Recipe
from rlframe.models.families.base import Architecture
from rlframe.rollout.served.config import ServedConfig
from rlframe.run.preflight import activations, constants
from rlframe.run.preflight.devices import Speeds
from rlframe.run.preflight.engine import EngineMemory
from rlframe.run.preflight.trainer import MOMENTS, TrainerMemory
from rlframe.run.preflight.weights import StageWeights, is_sparse, kind_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Operations:
    """Floating-point operations of one token's forward pass through all layers of a rank's stage, before tp."""

    dense: float
    attention: float
    experts: float
    head: float

    @property
    def all(self) -> float:
        """The sum."""
        return self.dense + self.attention + self.experts + self.head


def operations(
    architecture: Architecture,
    layers: tuple[int, ...],
    *,
    mean_length: float,
    last: bool,
    mtp: MtpConfig | None = None,
    predicted: float = 1.0,
) -> Operations:
    """Returns the operations of a token. Attention costs 4 for each query's number and each token that the query sees,
    which are s / 2 of a sequence of s tokens without windows and chunks.

    Sparse attention counts as dense, which is how it is computed. An indexer has no backward pass, and counts as a
    third of its forward pass, because training costs three times the result.

    Args:
        mean_length: sum of the squares of the sequences' tokens over their sum.
        mtp: the head for multi-token prediction, if it is trained. Detached, its use of the output layer has no
            gradient of weights and counts two thirds.
        predicted: share of the tokens that the loss counts. A language model computes the logits of these alone.
    """
    if last and mtp and mtp.trains and architecture.mtp_layers:
        layers = (*layers, architecture.layer_of_mtp)
    else:
        mtp = None
    hidden, heads = architecture.hidden_size, architecture.num_attention_heads
    queries, keys = heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    projections = 2 * hidden * queries + 2 * hidden * keys
    width = architecture.head_dim
    if shape := architecture.latent:
        width = (shape.plain_head_dim + shape.rotary_head_dim + shape.value_head_dim) / 2
        down = (shape.query_rank or 0) + shape.kv_rank + shape.rotary_head_dim
        up = heads * (shape.plain_head_dim + shape.rotary_head_dim) * ((shape.query_rank or hidden) / hidden)
        projections = hidden * down + up * hidden + heads * shape.value_head_dim * hidden
        projections += shape.kv_rank * heads * (shape.plain_head_dim + shape.value_head_dim)
    scoring = 0.0
    if indexer := architecture.indexer:
        assert shape is not None and shape.query_rank is not None
        wide = indexer.num_heads * indexer.head_dim
        projections += (shape.query_rank * wide + hidden * (indexer.head_dim + indexer.num_heads)) / 3
        scoring = wide / 2 / 3
    sparse = sum(is_sparse(architecture, layer) for layer in layers)
    plain = len(layers) - sparse
    states = sum(architecture.has_gated_delta_net(layer) for layer in layers)
    into_states, in_states = gated_delta_operations(architecture) if states else (0.0, 0.0)
    if architecture.output_gate:
        projections += hidden * queries
    mlp = 3 * hidden * architecture.ffn_hidden_size
    shared = 3 * hidden * architecture.shared_ffn_hidden_size + hidden * architecture.num_experts
    each = 3 * hidden * architecture.expert_ffn_hidden_size * architecture.experts_per_token
    seen = Counter(
        architecture.seen_tokens(layer, mean_length) for layer in layers if not architecture.has_gated_delta_net(layer)
    )
    return Operations(
        dense=2 * ((len(layers) - states) * projections + plain * mlp + sparse * shared) + states * into_states,
        attention=4 * sum(count * tokens for tokens, count in seen.items()) * (heads * width + scoring)
        + states * in_states,
        experts=2 * sparse * each,
        head=_head_operations(architecture, mtp, predicted) if last else 0.0,
    )


def _head_operations(architecture: Architecture, mtp: MtpConfig | None, predicted: float) -> float:
    """Returns the operations of a token in the output layer, and of what joins states with tokens if the head for
    multi-token prediction is trained, whose loss reads the logits of whole sequences."""
    hidden = architecture.hidden_size
    if architecture.num_outputs is not None:
        return 2 * hidden * architecture.num_outputs
    logits = 2 * hidden * architecture.vocab_size
    if mtp is None:
        return logits * predicted
    return logits * (1 + (2 / 3 if mtp.detach else 1.0)) + 4.0 * hidden**2


def gated_delta_operations(architecture: Architecture) -> tuple[float, float]:
    """Returns the operations of a token in one gated delta net: of its two matrices, and of the rule by chunks.

    In a chunk each token's key and query meet all keys, two triangular systems are solved for values and keys, and what
    is learned is read; then the state is read twice and written once (Yang et al. 2024, arXiv 2412.06464, section 3.3).
    """
    net, hidden = architecture.gated_delta_net, architecture.hidden_size
    assert net is not None
    keys, values = net.key_head_dim, net.value_head_dim
    matrices = hidden * (net.num_key_heads * net.projected + net.num_value_heads * values)
    rule = activations.CHUNK * (3 * keys + 2 * values) + 3 * keys * values
    return 2.0 * matrices, 2.0 * net.num_value_heads * rule


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """Seconds of one micro-batch on one rank, by what they are spent on."""

    products: float
    attention: float
    experts: float
    elementwise: float
    exchange: float
    """Messages between ranks that share a layer or its experts."""
    launches: float
    """Seconds in which the host launches kernels, beside which the device may work."""
    expert_launches: float
    """Launches that the device waits for, because the host reads the number of tokens of each expert first."""

    @property
    def seconds(self) -> float:
        """Seconds of the micro-batch."""
        device = self.products + self.attention + self.experts + self.elementwise + self.exchange
        return max(device, self.launches) + self.expert_launches


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSeconds:
    """Times a role that trains."""

    memory: TrainerMemory
    speeds: Speeds
    tokens: int
    """Tokens of the mean micro-batch on a rank."""
    mean_length: float
    """Sum of the squares of the sequences' tokens over their sum."""
    predicted: float = 1.0
    """Share of a micro-batch's tokens that the loss counts."""
    spans_hosts: bool = False
    """Whether ranks that share experts are on several hosts."""

    def optimizer_step(self) -> float:
        """Returns the seconds of one optimizer step: its micro-batches, gradient sums, the update."""
        return self.passes(backward=True) + self.update()

    def passes(self, *, backward: bool) -> float:
        """Returns the seconds of all micro-batches, with the pipeline's empty places: (pp - 1) / vpp more of them."""
        parallel = self.memory.parallel
        slowest = max(self.one_pass(stage, backward=backward).seconds for stage in self.memory.stages())
        return slowest * (self.memory.microbatches + (parallel.pp - 1) / parallel.vpp)

    def one_pass(self, stage: StageWeights, *, backward: bool) -> Pass:
        """Returns the seconds of one micro-batch on a rank of a stage."""
        memory, train, speeds = self.memory, self.memory.train, self.speeds
        parallel, tokens = memory.parallel, self.tokens
        again = activations.recomputed_fraction(train, stage.chunks) if backward else 0.0
        times = (3.0 if backward else 1.0) + again
        last = stage.stage == parallel.pp - 1
        mtp = train.mtp if backward else None
        count = operations(
            memory.architecture,
            stage.layers,
            mean_length=self.mean_length,
            last=last,
            mtp=mtp,
            predicted=self.predicted,
        )
        flops = speeds.flops * (1 if memory.itemsize == 2 else 1 / 16)
        products = flops * constants.DENSE_EFFICIENCY
        fast = constants.FP8_SPEEDUP if train.fp8.recipe is not Fp8Recipe.OFF else 1.0
        share = tokens / parallel.tp
        # With lora, weights have no gradients: a third of the products is left out.
        weight_free = (2 if backward else 1) + again if train.lora else times
        kernels = activations.Kernels.of(train, cuda=True)
        sparse = sum(is_sparse(memory.architecture, layer) for layer in stage.layers)
        kept = sum(
            layers * each.bytes
            for kind, layers in Counter(kind_of(memory.architecture, layer) for layer in stage.layers).items()
            for each in activations.layer(memory.architecture, kernels, parallel, kind)
        )
        moved = kept * constants.PASSES * times / 3 * share / speeds.memory
        moved += self._adapters(stage.layers, share, again, backward=backward)
        # By chunks the logits are computed again, and only they: a layer's recomputation is in `times` already.
        head_times = 4.0 if backward and memory.chunk else times
        experts = share * count.experts * weight_free / (flops * self._expert_efficiency)
        return Pass(
            products=share * (count.dense * weight_free / fast + count.head * head_times) / products,
            attention=share * count.attention * attention_times(again, backward=backward) / flops,
            experts=experts,
            elementwise=moved + sparse * self._sorting(share) * times / 3,
            exchange=self._exchange(stage.layers, sparse, share, times) + self._from_host(stage, backward=backward),
            launches=self._launches(len(stage.layers), sparse, again, backward=backward),
            expert_launches=self._expert_launches(sparse, experts / times) if backward else 0.0,
        )

    def _adapters(self, layers: tuple[int, ...], share: float, again: float, *, backward: bool) -> float:
        """Returns the seconds in which the low-rank products of a micro-batch move bytes; their operations are few.

        Forward an adapter reads its input, writes what it adds, and adds: two reads, one write. Backward both halves
        read the gradient of the output, A reads the input, whose gradient is written and added.
        """
        if (lora := self.memory.train.lora) is None:
            return 0.0
        widths = [self.memory.counter.adapter_widths(lora, layer) for layer in layers]
        # A stage may have no layer.
        inputs, outputs = map(sum, zip(*widths, strict=True)) if widths else (0.0, 0.0)
        numbers = (1 + again) * (inputs + 4 * outputs) + ((5 * inputs + 2 * outputs) if backward else 0.0)
        return numbers * self.memory.itemsize * share / self.speeds.memory

    def _sorting(self, share: float) -> float:
        shape, parallel = self.memory.architecture, self.memory.parallel
        inputs = shape.experts_per_token * shape.hidden_size * self.memory.itemsize
        alone = parallel.ep * parallel.etp == 1
        apart = constants.SORTING_PASSES_ONCE if self._sends_once else constants.SORTING_PASSES
        return share * inputs * (constants.SORTING_PASSES_ALONE if alone else apart) / self.speeds.memory

    @property
    def _sends_once(self) -> bool:
        """Returns whether a token goes once to each rank that has experts of its."""
        moe, parallel = self.memory.train.moe, self.memory.parallel
        is_quantized = self.memory.train.fp8.recipe is not Fp8Recipe.OFF
        return moe.send_once and moe.dispatcher is Dispatcher.ALLTOALL and parallel.etp == 1 and not is_quantized

    def _to_experts(self, share: float) -> float:
        """Returns the bytes that a layer of experts sends to other ranks and gets back, over the part of a link's speed
        that its messages reach."""
        shape, parallel = self.memory.architecture, self.memory.parallel
        hidden, ranks = shape.hidden_size * self.memory.itemsize, parallel.ep * parallel.etp
        if not self._sends_once:
            moved = 2 * shape.experts_per_token * hidden * share * (ranks - 1) / ranks
            return moved / constants.COLLECTIVE_EFFICIENCY
        # Other ranks that have at least one of a token's experts, which are drawn evenly.
        receivers = (ranks - 1) * (1 - (1 - 1 / ranks) ** shape.experts_per_token)
        weights = shape.num_experts / ranks * activations.FLOAT32
        return receivers * (2 * hidden + weights) * share / constants.ONCE_EFFICIENCY

    def _from_host(self, stage: StageWeights, *, backward: bool) -> float:
        """Returns the seconds in which the inputs of layers come back from host memory. The way there is hidden."""
        part = self.tokens / self.memory.tokens
        return self.memory.activations(stage).moved * part / constants.HOST_BANDWIDTH if backward else 0.0

    def _exchange(self, stage: tuple[int, ...], sparse: int, share: float, times: float) -> float:
        """Returns the seconds of the messages of a micro-batch: to and from experts (ep), around attention and MLP (tp:
        two gathers and two scatters of the hidden states a pass), and of keys and values, or heads (cp)."""
        memory, parallel = self.memory, self.memory.parallel
        shape, size = memory.architecture, memory.itemsize
        link = self.speeds.network if self.spans_hosts else self.speeds.peer
        hidden = shape.hidden_size * size
        # times counts backward twice, but messages go the same way back once: 3 becomes 2.
        rounds = times if times < 2 else times - 1
        layers, states = len(stage), sum(shape.has_gated_delta_net(layer) for layer in stage)
        around = 4 * hidden * share * (parallel.tp - 1) * (layers - sparse / 2)
        keys = 2 * shape.num_kv_heads * shape.head_dim * size * share * (parallel.cp - 1) * (layers - states)
        if memory.train.context_parallel.communication is ContextCommunication.A2A:
            # Queries, keys and values to the ranks of their heads, and outputs back.
            heads = 2 * (shape.num_attention_heads + shape.num_kv_heads) * shape.head_dim
            keys = heads * size * share * (parallel.cp - 1) / parallel.cp * (layers - states)
        if net := shape.gated_delta_net:
            # Inputs of the heads to the ranks that have whole sequences of them, and their outputs back.
            heads = net.num_key_heads * net.projected + net.num_value_heads * net.value_head_dim
            keys += heads * size * share * (parallel.cp - 1) / parallel.cp * states
        stages = 2 * hidden * share if parallel.pp > 1 else 0.0
        others = (around + keys + stages) / (self.speeds.peer * constants.COLLECTIVE_EFFICIENCY)
        return rounds * (self._to_experts(share) * sparse / link + others)

    def _launches(self, layers: int, sparse: int, again: float, *, backward: bool) -> float:
        whole = constants.LAUNCHES_PER_LAYER * (layers - sparse) + constants.LAUNCHES_PER_MOE_LAYER * sparse
        part = (1.0 if backward else constants.FORWARD_LAUNCHES) + again * constants.FORWARD_LAUNCHES
        return whole * part * constants.LAUNCH_S

    @property
    def _expert_efficiency(self) -> float:
        joins = self.memory.train.joins_experts and self.memory.itemsize == 2
        return constants.JOINED_EXPERT_EFFICIENCY if joins else constants.EXPERT_EFFICIENCY

    def _expert_launches(self, sparse: int, once_s: float) -> float:
        """Returns by how much launching the gradients of each expert's weights takes longer than computing them.

        Args:
            once_s: seconds of the device for one of the three products of every expert.
        """
        if self.memory.train.joins_experts:
            return 0.0
        singly = not self.memory.train.kernels.cutlass_experts
        each = constants.LAUNCHES_PER_EXPERT_SINGLY if singly else constants.LAUNCHES_PER_EXPERT
        held = self.memory.architecture.num_experts / self.memory.parallel.ep
        return max(0.0, each * held * sparse * constants.LAUNCH_S - once_s * (3 if singly else 1))

    def update(self) -> float:
        """Returns the seconds of gradient sums, the optimizer and the gathering of parameters."""
        return max(self._update(stage) for stage in self.memory.stages())

    def _update(self, stage: StageWeights) -> float:
        memory, parallel = self.memory, self.memory.parallel
        states = {part.name: part.bytes for part in memory.states(stage)}
        shard_bytes = 2 * (states.get("main weights", 0.0) + states[MOMENTS]) + states["gradients"]
        copies = parallel.dp * parallel.cp
        link = self.speeds.network if self.spans_hosts else self.speeds.peer
        gradient = states["gradients"] / max(1, stage.trained_dense + stage.trained_experts) + memory.itemsize
        moved = stage.trained_dense * gradient * (copies - 1) / copies
        moved += stage.trained_experts * gradient * (parallel.edp - 1) / parallel.edp
        hidden = 0.5 if memory.train.communication.overlap_grad_reduce else 1.0
        return (
            shard_bytes / (self.speeds.memory * self._optimizer_bandwidth)
            + moved * hidden / (link * constants.COLLECTIVE_EFFICIENCY)
            + self._host_update(stage)
            + self._orthogonalization(stage)
        )

    @property
    def _optimizer_bandwidth(self) -> float:
        fuses = self.memory.train.fuses_optimizer
        return constants.OPTIMIZER_BANDWIDTH if fuses else constants.OPTIMIZER_BANDWIDTH_APART

    def _orthogonalization(self, stage: StageWeights) -> float:
        """Returns the seconds of Muon's matrix products, which the ranks of a stage share; not measured."""
        memory, optimizer = self.memory, self.memory.train.optimizer
        if optimizer.name != OptimizerName.MUON:
            return 0.0
        count = memory.counter.orthogonalization(stage.layers, steps=optimizer.muon.newton_schulz_steps)
        flops = self.speeds.flops * (1 if memory.itemsize == 2 else 1 / 16) * constants.DENSE_EFFICIENCY
        return count / (memory.parallel.world / memory.parallel.pp) / flops

    def _host_update(self, stage: StageWeights) -> float:
        """Returns the seconds of the part that the CPU updates: 16 bytes a parameter at 25 GB/s, not measured."""
        optimizer, parallel = self.memory.train.optimizer, self.memory.parallel
        shard = stage.trained_dense / (parallel.dp * parallel.cp) + stage.trained_experts / parallel.edp
        return shard * optimizer.cpu_offload_fraction * 16 / 25e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Responses:
    """The responses that an engine samples in a step."""

    sequences: int
    """On one engine."""
    prompt_tokens: float
    tokens: float
    """Mean number of tokens of a response."""
    longest: int
    """Tokens of the longest response."""
    group: int = 1
    """Responses to one prompt, whose keys and values are computed once."""


def attention_times(again: float, *, backward: bool) -> float:
    """Returns the passes of attention over the efficiency of each; backward has twice the operations."""
    forward, back = constants.ATTENTION_FORWARD_EFFICIENCY, constants.ATTENTION_BACKWARD_EFFICIENCY
    return (1 + again) / forward + (2 / back if backward else 0.0)


def generation(memory: EngineMemory, speeds: Speeds, responses: Responses, operations_of_token: float) -> float:
    """Returns the seconds in which an engine samples: prompts at the speed of products, then for each token the weights
    and all keys and values read once. The last responses run alone. Engines that share a device share its speeds. A
    step takes as long as the engine's process decides, if that is longer.

    Args:
        operations_of_token: of a forward pass of the whole model, without attention.
    """
    tp, sharing = memory.config.devices_per_engine, memory.config.engines_per_device
    prompts = responses.sequences / responses.group * responses.prompt_tokens
    prefill = prompts * operations_of_token / (tp * speeds.flops / sharing * constants.PREFILL_EFFICIENCY)
    steps, batch = waves(memory, responses)
    bandwidth = speeds.memory / sharing * constants.DECODE_EFFICIENCY
    # Of T tokens of a response, the mean one sees the prompt and half of the response.
    seen = prompt_read(memory, responses) + responses.tokens / 2
    read = responses.sequences * responses.tokens * seen * memory.token_bytes / bandwidth
    step = weights_read(memory, batch) / bandwidth + memory.architecture.num_layers * constants.DECODE_LAYER_S
    return prefill + max(steps * step + read, steps * batch * scheduling_s(memory))


def scheduling_s(memory: EngineMemory) -> float:
    """Returns the seconds for each sequence of a decode step in which an engine's process decides what comes next."""
    if not isinstance(memory.config, ServedConfig):
        return 0.0
    if memory.config.devices_per_engine > 1:
        return constants.DECODE_SEQUENCE_OF_RANKS_S
    return constants.DECODE_SEQUENCE_APART_S if memory.config.prepares_apart else constants.DECODE_SEQUENCE_S


def prompt_read(memory: EngineMemory, responses: Responses) -> float:
    """Returns the tokens of a prompt that each of its responses has read from the device's memory in a decode step.
    Those of a group have the same blocks of the cache, and a layer reads them for all at once: they come from the L2
    cache, if that holds a layer's, for all but the first."""
    layers = memory.architecture.num_layers
    fits = responses.prompt_tokens * memory.token_bytes / layers <= constants.L2_BYTES
    once = fits or memory.config.reads_shared_once
    return responses.prompt_tokens / (responses.group if once else 1)


def waves(memory: EngineMemory, responses: Responses) -> tuple[float, float]:
    """Returns the number of decode steps and the mean number of sequences in one."""
    at_once = memory.cache_tokens // max(1, int(responses.prompt_tokens + responses.tokens)) or 1
    if isinstance(memory.config, ServedConfig):
        at_once = min(at_once, memory.config.max_num_seqs)
    rounds = max(1.0, responses.sequences / at_once)
    steps = responses.longest + (rounds - 1) * responses.tokens
    return steps, responses.sequences * responses.tokens / steps


def weights_read(memory: EngineMemory, batch: float) -> float:
    """Returns the bytes of weights that one decode step of `batch` sequences reads on a device. Of an expert, all or
    nothing: 1 - (1 - k / E)^batch of them are chosen."""
    shape = memory.architecture
    sparse = sum(is_sparse(shape, layer) for layer in range(shape.num_layers))
    experts = sparse * shape.num_experts * 3 * shape.hidden_size * shape.expert_ffn_hidden_size
    chosen = 1 - (1 - shape.experts_per_token / shape.num_experts) ** batch if experts else 0.0
    embedding = 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    dense = memory.parameters - experts - embedding
    return (dense + experts * chosen) * memory.itemsize / memory.config.devices_per_engine


def sync(memory: EngineMemory, speeds: Speeds, *, colocated: bool, same_host: bool, sources: int) -> float:
    """Returns the seconds of a weight sync in which each engine device pulls its weights from ranks that hold a part
    each. With shared devices one of `sources` parts is on the device already."""
    link = speeds.peer if same_host else speeds.network
    remote = (sources - 1) / sources if colocated else 1.0
    pulled = memory.config.engines_per_device * memory.weights_bytes
    local = pulled * (1 - remote) / (speeds.memory / 2)
    return constants.SYNC_LATENCY_S + max(pulled * remote / (link * constants.SYNC_EFFICIENCY), local)


def training_operations(
    architecture: Architecture, *, mean_length: float, mtp: MtpConfig | None = None, predicted: float = 1.0
) -> float:
    """Returns the operations of a token of training, as an MFU counts them: without recomputation.

    Args:
        predicted: see `operations`.
    """
    layers = tuple(range(architecture.num_layers))
    return 3 * operations(architecture, layers, mean_length=mean_length, last=True, mtp=mtp, predicted=predicted).all


def mean_length(lengths: Iterator[int] | list[int]) -> float:
    """Returns the sum of squares over the sum."""
    values = list(lengths)
    return math.fsum(value**2 for value in values) / sum(values)
