"""A frozen model for forward passes, and the rank of a worker group that holds only such a model."""

from dataclasses import replace

import torch
from torch import Tensor

from rlframe.megatron.config.forward_only import forward_only
from rlframe.megatron.config.parallel import Parallel
from rlframe.megatron.config.train import TrainConfig
from rlframe.megatron.messages.microbatch import Microbatch
from rlframe.megatron.messages.setup import RankSetup
from rlframe.megatron.model import forward, model
from rlframe.megatron.model.model import Model
from rlframe.megatron.proof.constant import ConstantWeights
from rlframe.megatron.worker import parallel
from rlframe.models.checkpoint import CheckpointReader
from rlframe.models.config import ModelConfig
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.weight_sync.layout.memory import clear_padding, load_tensor


def frozen_model(
    config: ModelConfig, train: TrainConfig, *, device: torch.device, num_outputs: int | None = None
) -> Model:
    """Returns the model of `config` with its weights, in the layout of `train.parallel`. `parallel.initialize` must be
    called first.

    Args:
        num_outputs: number of outputs of its head; None means a language model.
    """
    folder = resolve(config)
    family = load_family(folder)
    architecture = family.architecture(read_config(folder)).with_outputs(num_outputs)
    layout = Parallel.parse(train.parallel)
    if not architecture.num_experts:
        # For a dense model the ranks that share the policy's experts are plain data-parallel ones.
        layout = replace(layout, ep=1, etp=1)
    built = model.build(
        family,
        architecture,
        forward_only(train, layout),
        device=device,
        float32_logits=config.float32_logits,
        frozen=True,
    )
    reader = CheckpointReader(folder)
    with torch.no_grad():
        clear_padding(built.layout, built.parameters)
        for name in built.layout.boxes:
            load_tensor(built.layout, built.parameters, name, reader.tensor(name))
    return built


class ForwardOnly:
    """One rank of a frozen model's own group. Every method is called on all ranks of the group at once."""

    def __init__(self, setup: RankSetup):
        self.setup = setup
        self.coordinates = parallel.initialize(
            Parallel.parse(setup.train.parallel),
            rank=setup.rank,
            device=setup.device,
            init_method=setup.init_method,
            # No random numbers are drawn: weights are loaded, and no forward pass here has dropout.
            seed=0,
            timeout_s=setup.timeout_s,
        )
        self.model = frozen_model(setup.model, setup.train, device=setup.device, num_outputs=setup.num_outputs)
        self.constant = ConstantWeights(setup.model.path, self.model)

    def prove(self) -> None:
        """Compares the weights with those that were loaded. Raises WeightsDrifted."""
        self.constant.require_unchanged(self.setup.rank)

    def logprobs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """Returns [T] nats per micro-batch; empty unless this rank reports."""
        return forward.compute_logprobs(self.model, microbatches, temperature=self.setup.temperature)

    def top(self, microbatches: list[Microbatch], *, k: int, temperature: float) -> list[Tensor]:
        """See `forward.compute_top`; empty unless this rank reports."""
        return forward.compute_top(self.model, microbatches, k=k, temperature=temperature)

    def outputs(self, microbatches: list[Microbatch]) -> list[Tensor]:
        """See `forward.compute_outputs`; empty unless this rank reports."""
        return forward.compute_outputs(self.model, microbatches)
