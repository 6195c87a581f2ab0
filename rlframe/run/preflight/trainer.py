"""Memory of a rank that trains, or that only computes forward passes.

Source: Megatron-Core 0.16.1's distributed optimizer as rlframe.megatron.worker.optimizer sets it up: parameters and
gradients whole on every rank, main weights and moments divided over the ranks that hold copies of a parameter
(Rajbhandari et al. 2020, arXiv 1910.02054, section 5.2): dp * cp of dense ones, edp of experts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlframe.megatron.config.optimizer import OptimizerName
from rlframe.megatron.config.options import Fp8Recipe, MomentDtype, Recompute
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import Dtype, TrainConfig
from rlframe.models.families.base import Architecture
from rlframe.models.shards import padded_vocab_size
from rlframe.run.preflight import activations, constants
from rlframe.run.preflight.parts import Part, Phase, Process
from rlframe.run.preflight.weights import Counter, StageWeights, kind_of
from rlframe.run.preflight.workload import layout_of

FLOAT32 = 4
GRADIENTS, MOMENTS = "gradients", "moments"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """The memory of a role that trains."""

    role: str
    train: TrainConfig
    architecture: Architecture
    counter: Counter
    tokens: int
    """Tokens of the largest micro-batch on one rank."""
    microbatches: int
    """Micro-batches of an optimizer step on one rank."""
    sequence_tokens: int
    """Tokens of a sequence."""
    keys_per_token: float = 1.0
    """See Division."""
    logits_copies: int = 1
    """Tensors as large as the logits at the loss. 1 where backward writes over the logits."""
    float32_logits: bool = False
    """See ModelConfig."""
    forward_passes: bool = True
    """Whether a phase of logprobs precedes training."""
    merges: bool = True
    """Whether weights with adapters are held a second time, merged."""
    cuda: bool = True
    teacher_bytes: float = 0.0
    """Weights of a teacher in the same ranks."""
    quantizes: bool = False
    """Whether it keeps the weights as engines in FP8 receive them."""
    phase: Phase = Phase.TRAIN
    """The phase in which it trains."""

    @property
    def parallel(self) -> Parallel:
        """The layout of the ranks."""
        return layout_of(self.train.parallel)

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return 2 if self.train.dtype == Dtype.BFLOAT16 else 4

    def stages(self) -> list[StageWeights]:
        """Returns the weights of a rank of each stage."""
        return self.counter.stages(self.parallel, self.train.lora)

    def process(self) -> Process:
        """Returns the rank that takes most while it trains."""
        return max((self.rank(stage) for stage in self.stages()), key=lambda process: peak(process))

    def rank(self, stage: StageWeights) -> Process:
        """Returns a rank of one stage."""
        context = tuple(self._context())
        weights = Part("parameters", stage.all * self.itemsize)
        merged = Part("merged adapters", stage.adapted * self.itemsize if self.merges else 0)
        quantized = Part("weights as engines receive them, in 8 bits", self.matrices(stage) if self.quantizes else 0)
        teacher = Part("teacher", self.teacher_bytes)
        states = tuple(self.states(stage))
        work = {self.phase: tuple(self._training(stage))}
        if self.forward_passes:
            work[Phase.LOGPROBS] = tuple(self._forward(stage))
        stays = tuple(part for part in states if self._stays_asleep(part))
        return Process(
            role=self.role,
            resident=(weights, merged, quantized, teacher, *states, *context),
            asleep=(weights, merged, quantized, teacher, *stays, *context) if self.train.sleeps else None,
            work=work,
        )

    def _stays_asleep(self, part: Part) -> bool:
        """Returns whether a part of `states` keeps its memory while the role sleeps."""
        return part.name != GRADIENTS and not self.train.offload_optimizer

    def states(self, stage: StageWeights) -> Iterator[Part]:
        """Yields gradients, main weights and moments."""
        train, optimizer, parallel = self.train, self.train.optimizer, self.parallel
        trained = stage.trained_dense + stage.trained_experts
        gradient = FLOAT32 if train.communication.reduce_in_float32 else self.itemsize
        yield Part(GRADIENTS, trained * gradient)
        shard = stage.trained_dense / (parallel.dp * parallel.cp) + stage.trained_experts / parallel.edp
        on_device = 1.0 - optimizer.cpu_offload_fraction
        if train.dtype == Dtype.BFLOAT16:
            # With precision_aware they are the 16 bits that the parameters lack.
            yield Part("main weights", shard * (2 if optimizer.precision_aware else FLOAT32) * on_device)
        moment = 2 if optimizer.moment_dtype is MomentDtype.BFLOAT16 else FLOAT32
        yield Part(MOMENTS, (shard * 2 * moment - self.second_moments_of_matrices(stage)) * on_device)
        if train.fp8.recipe is not Fp8Recipe.OFF and self.cuda:
            yield Part("weights in 8 bits, by rows and by columns", self.matrices(stage) * 2)

    def matrices(self, stage: StageWeights) -> float:
        """Returns the number of weights of a rank apart from embedding and output layer."""
        shape, parallel = self.architecture, self.parallel
        rows = padded_vocab_size(shape, tp=parallel.tp) // parallel.tp
        last = stage.stage == parallel.pp - 1 and shape.num_outputs is None
        # The last stage of several has a copy of an embedding that is tied.
        output = last and (parallel.pp > 1 or not shape.tie_embeddings)
        return stage.all - ((stage.stage == 0) + output) * rows * shape.hidden_size

    def state_bytes(self, stage: StageWeights) -> float:
        """Returns the bytes of a checkpoint that a rank holds, at most: weights, main weights and moments."""
        shard = stage.trained_dense / (self.parallel.dp * self.parallel.cp) + stage.trained_experts / self.parallel.edp
        weights = stage.trained_dense + stage.trained_experts if self.train.lora else stage.all
        return weights * self.itemsize + shard * 3 * FLOAT32

    def second_moments_of_matrices(self, stage: StageWeights) -> float:
        """Returns the bytes that Muon does without, which has a momentum alone."""
        if self.train.optimizer.name != OptimizerName.MUON:
            return 0.0
        dense, experts = self.counter.matrices(self.parallel, stage.layers)
        return FLOAT32 * (dense / (self.parallel.dp * self.parallel.cp) + experts / self.parallel.edp)

    def _context(self) -> Iterator[Part]:
        if not self.cuda:
            return
        yield Part("workspaces of kernels", constants.WORKSPACE_BYTES)
        yield Part("CUDA's context", constants.CONTEXT_BYTES, measured=False)
        if self.parallel.world > 1:
            yield Part("NCCL's buffers", constants.NCCL_BYTES, measured=False)

    def _training(self, stage: StageWeights) -> Iterator[Part]:
        kept = self._activations(stage)
        end = self._end(stage)
        trained = stage.head and stage.trains_head
        head_gradient = stage.head * self.itemsize if trained else 0
        if self.float32_logits and end[0]:
            # The gradient of the logits, rounded.
            head_gradient += end[0] / self.logits_copies / FLOAT32 * self.itemsize
        if self.chunk and trained:
            # The sum over chunks, and the product of one.
            head_gradient += stage.head * FLOAT32
        # The output layer's gradients exist while all activations do; a layer that is recomputed has them no more.
        if sum(end) + head_gradient >= kept.working:
            yield Part("activations", kept.kept)
            yield self._logits(end[0])
            yield Part("input of the output layer", end[1])
            yield Part("gradient of the output layer", head_gradient)
        else:
            yield Part("activations", kept.kept)
            yield Part("activations of the layers at work", kept.working)
        yield from self._masks(stage, microbatches=self.in_flight(stage.stage), backward=True)
        if stage.stage == self.parallel.pp - 1 and self.train.mtp.trains and self.architecture.with_mtp:
            yield Part("head for multi-token prediction", self._mtp() + end[0] / self.logits_copies)
        if self.train.deterministic and self.cuda:
            heads = self.architecture.num_attention_heads // self.parallel.tp
            yield Part("deterministic attention", constants.DETERMINISTIC_BYTES * heads * self.tokens**2)

    def _masks(self, stage: StageWeights, *, microbatches: float = 1.0, backward: bool = False) -> Iterator[Part]:
        """Yields which keys each query sees under sparse attention, a byte for each pair of them in every layer of a
        micro-batch, recomputed or not; and what scaled_dot_product_attention adds to the scores in their place, which a
        layer keeps for its backward pass unless it is recomputed."""
        indexer = self.architecture.indexer
        if indexer is None or self.sequence_tokens <= indexer.top_k:
            return
        pairs = self.tokens * min(self.tokens, self.sequence_tokens)
        added = len(stage.layers) * microbatches if backward and self._keeps_attention else 1
        yield Part("masks of sparse attention", pairs * (len(stage.layers) * microbatches + added * self.itemsize))

    @property
    def _keeps_attention(self) -> bool:
        """Returns whether layers keep what attention between queries and keys needs for its backward pass."""
        modules = self.train.recompute_options.modules
        selective = self.train.recompute is Recompute.SELECTIVE and "core_attn" in modules
        return self.train.recompute is not Recompute.FULL and not selective

    def _mtp(self) -> float:
        """Returns the bytes that the head for multi-token prediction keeps, whose layer is never recomputed: inputs and
        outputs of its norms, of its projection and of its layer."""
        kernels = activations.Kernels.of(self.train, cuda=self.cuda)
        kind = kind_of(self.architecture, self.architecture.layer_of_mtp)
        layer = sum(each.bytes for each in activations.layer(self.architecture, kernels, self.parallel, kind))
        around = 6 * self.architecture.hidden_size * kernels.itemsize
        return self.tokens / self.parallel.tp * (layer + around)

    def _of_chunks(self, chunks: Sequence[tuple[int, ...]]) -> activations.Activations:
        return activations.of_stage(
            self.architecture,
            self.train,
            chunks,
            tokens=self.tokens,
            cuda=self.cuda,
            keys_per_token=self.keys_per_token,
        )

    def _activations(self, stage: StageWeights) -> activations.Activations:
        one = self.activations(stage)
        times = 1.0 if one.on_host else self.in_flight(stage.stage)
        return activations.Activations(kept=one.kept * times, working=one.working)

    def activations(self, stage: StageWeights) -> activations.Activations:
        """Returns the activations of one micro-batch on a rank of a stage."""
        return self._of_chunks(stage.chunks)

    def host_activations(self) -> float:
        """Returns the bytes of activations that a rank keeps in host memory."""
        return max(self.activations(stage).on_host * self.in_flight(stage.stage) for stage in self.stages())

    @property
    def chunk(self) -> int:
        """Tokens whose logits exist at once; 0 if all do."""
        wanted = self.train.logits_chunk_tokens or 0
        return wanted if wanted < self.tokens and self.architecture.num_outputs is None else 0

    def in_flight(self, stage: int) -> float:
        """Returns the micro-batches whose activations a stage holds at once, in micro-batches of the whole stage.

        Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2: as many as there are stages from this one on. In
        an interleaved schedule a stage begins as many chunks as Megatron-Core's `get_pp_rank_microbatches` says, and
        one more, before it gives the first one back.
        """
        parallel = self.parallel
        after = parallel.pp - stage - 1
        if parallel.vpp == 1:
            return min(self.microbatches, after + 1)
        return min(self.microbatches, (2 * after + (parallel.vpp - 1) * parallel.pp + 1) / parallel.vpp)

    def _end(self, stage: StageWeights) -> tuple[float, float]:
        """Returns the bytes of the logits and of what leads to them."""
        if stage.stage != self.parallel.pp - 1:
            return 0.0, 0.0
        share = self.tokens / self.parallel.tp
        norm = 2 * share * self.architecture.hidden_size * self.itemsize
        if self.architecture.num_outputs is not None:
            return 0.0, norm
        columns = padded_vocab_size(self.architecture, tp=self.parallel.tp) // self.parallel.tp
        logit = FLOAT32 if self.float32_logits else self.itemsize
        if self.chunk:
            # The states of all tokens, which each rank has whole, and their gradients.
            states = 2 * self.tokens * self.architecture.hidden_size * self.itemsize
            return self.chunk * columns * logit, norm + states
        return self.tokens * columns * logit * self.logits_copies, norm

    def _forward(self, stage: StageWeights) -> Iterator[Part]:
        logits, norm = self._end(stage)
        working = self._of_chunks([stage.layers[:1]]).working
        yield Part("activations of the layers at work", max(working, norm))
        yield self._logits(logits)
        yield from self._masks(stage)

    def _logits(self, size: float) -> Part:
        once = self.train.offload_optimizer or self.train.lora
        return Part("logits", size, again=size * (constants.LOGITS_AGAIN_ASLEEP if once else constants.LOGITS_AGAIN))


def peak(process: Process) -> float:
    """Returns the bytes of the phase that takes most of this process."""
    return max(sum(part.bytes for part in process.at(phase)) for phase in process.work)


def frozen_process(
    role: str,
    counter: Counter,
    train: TrainConfig,
    *,
    tokens: int,
    sequence_tokens: int,
    cuda: bool,
    phase: Phase = Phase.LOGPROBS,
) -> Process:
    """Returns the rank of a frozen model that takes most: a reward model, or a teacher with ranks of its own."""
    memory = TrainerMemory(
        role=role, train=train, architecture=counter.architecture, counter=counter, tokens=tokens, microbatches=1,
        sequence_tokens=sequence_tokens, cuda=cuda,
    )  # fmt: skip
    ranks = []
    for stage in memory.stages():
        weights = Part("parameters", stage.all * memory.itemsize)
        ranks.append(
            Process(role=role, resident=(weights, *memory._context()), work={phase: tuple(memory._forward(stage))})
        )
    return max(ranks, key=peak)
