"""Faults to plant in the processes of a run, for `tests.campaigns.self_tests`.

A run names this file as one with a check of one's own, so that it is read in the driver and in every worker before
anything starts there. It then plants the fault that the environment variable RLFRAME_PLANTED names.
"""

import copy
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch

from rlframe.loops import online
from rlframe.loops.self_test.finding import Check, Finding
from rlframe.loops.self_test.seen import Seen
from rlframe.types.rollout import FinishReason

VARIABLE = "RLFRAME_PLANTED"
LEAK_BYTES = 80_000_000


class Planted(Check):
    """Finds nothing."""

    def findings(self, seen: Seen) -> Iterator[Finding]:
        """See Check."""
        yield from ()


def changed(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a function by `change`, which gets it as its first argument."""
    original = getattr(owner, name)

    @wraps(original)
    def call(*arguments: Any, **named: Any) -> Any:
        return change(original, *arguments, **named)

    setattr(owner, name, call)


def in_engine(plant: Callable[[Any], None]) -> None:
    """Plants a fault in each engine when it is built."""
    # Ray has the actor's own methods by then.
    from rlframe.rollout.transformers.engine import TransformersEngine

    def build(original: Any, engine: Any, *arguments: Any, **named: Any) -> None:
        original(engine, *arguments, **named)
        plant(engine)

    changed(TransformersEngine, "__init__", build)


def in_trainer(plant: Callable[[Any], None]) -> None:
    """Plants a fault in each rank of the policy when it is built."""
    from rlframe.megatron.worker import worker

    def build(original: Any, trainer: Any, *arguments: Any, **named: Any) -> None:
        original(trainer, *arguments, **named)
        plant(trainer)

    def prepare(original: Any, setup: Any) -> None:
        original(setup)
        # Not before it: Megatron looks at torch when it is imported.
        from rlframe.megatron.worker.trainer import Trainer

        changed(Trainer, "__init__", build)

    changed(worker, "prepare", prepare)


def in_batch(plant: Callable[[Any], Any]) -> None:
    """Changes each batch that the driver packs."""
    changed(online, "pack", lambda original, *arguments, **named: plant(original(*arguments, **named)))


def in_completions(plant: Callable[[Any], None]) -> None:
    """Changes what the engine returns."""
    from rlframe.rollout.transformers.decode import DecodeLoop

    def completions(original: Any, loop: Any) -> Any:
        found = original(loop)
        for each in found:
            plant(each)
        return found

    changed(DecodeLoop, "completions", completions)


def engine_temperature() -> None:
    """The engine samples at another temperature, and says so in its logprobs."""
    from rlframe.rollout.transformers import decode

    def sample(original: Any, logits: Any, *, sampling: Any, **named: Any) -> Any:
        return original(logits, sampling=replace(sampling, temperature=0.8 * sampling.temperature), **named)

    changed(decode, "sample", sample)


def trainer_temperature() -> None:
    """The trainer takes another temperature than the settings say."""

    def plant(trainer: Any) -> None:
        trainer.setup = replace(trainer.setup, temperature=1.25 * trainer.setup.temperature)

    in_trainer(plant)


def sharpened_samples() -> None:
    """The engine draws likely tokens too often, and reports the logprobs of the model."""
    from rlframe.rollout.base import sampling

    changed(sampling, "draw", lambda original, probabilities, uniform: original(probabilities**2, uniform))


def stale_layer() -> None:
    """The sync leaves out one layer of the engine."""
    from rlframe.weight_sync.endpoints import WeightDestination

    def receive(original: Any, destination: Any) -> Any:
        old = {name: value.clone() for name, value in destination._parameters.items() if ".layers.1." in name}
        transport = destination._transport

        def pull(pulled: Any) -> None:
            pulled()
            for name, value in old.items():
                destination._parameters[name].copy_(value)

        changed(transport, "pull", pull)
        try:
            return original(destination)
        finally:
            del transport.pull

    changed(WeightDestination, "receive", receive)


def second_copy() -> None:
    """The engine computes one layer with a copy of its weights that no sync reaches, so that digests are right."""

    def plant(engine: Any) -> None:
        layers = engine.model.model.layers
        layers[1] = copy.deepcopy(layers[1])

    in_engine(plant)


def blind_proof() -> None:
    """The engine digests its memory once and says the same again."""
    from rlframe.weight_sync.endpoints import WeightDestination

    def digests(original: Any, destination: Any) -> Any:
        if not hasattr(destination, "planted") or destination._transport is not destination.planted[0]:
            destination.planted = (destination._transport, original(destination))
        return destination.planted[1]

    def receive(original: Any, destination: Any) -> Any:
        vars(destination).pop("planted", None)
        return original(destination)

    changed(WeightDestination, "digests", digests)
    changed(WeightDestination, "receive", receive)


def skipped_layer() -> None:
    """The engine leaves out one layer."""

    def plant(engine: Any) -> None:
        engine.model.model.layers[1].forward = lambda hidden, *_, **__: hidden

    in_engine(plant)


def wrong_routes() -> None:
    """The engine's routers of one layer choose experts by the weights of another layer."""

    def plant(engine: Any) -> None:
        first, second = (layer.mlp.gate for layer in engine.model.model.layers[:2])
        second.forward = first.forward

    in_engine(plant)


def off_by_one() -> None:
    """Each token has the logprob of the one before it."""
    in_completions(lambda each: setattr(each, "logprobs", np.roll(each.logprobs, 1)))


def prompt_in_mask() -> None:
    """The last token of each prompt counts in the loss."""

    def plant(batch: Any) -> Any:
        before = torch.cat([batch.loss_mask[1:], batch.loss_mask[:1]])
        return replace(batch, loss_mask=batch.loss_mask | (before & ~batch.loss_mask))

    in_batch(plant)


def last_token_lost() -> None:
    """The last token of each response does not count in the loss."""

    def plant(batch: Any) -> Any:
        mask = batch.loss_mask.clone()
        mask[batch.lengths.cumsum(0) - 1] = False
        return replace(batch, loss_mask=mask)

    in_batch(plant)


def dropped_end() -> None:
    """Responses that ended by themselves come without the token that ends them."""

    def plant(each: Any) -> None:
        if each.finish_reason is FinishReason.STOP and len(each.token_ids) > 1:
            each.token_ids, each.logprobs, each.versions = each.token_ids[:-1], each.logprobs[:-1], each.versions[:-1]

    in_completions(plant)


def doubled_token() -> None:
    """The last sequence but one of each batch is there in the place of the last too."""
    # Of the same group, whose size stays right.
    in_batch(lambda batch: batch.select([*range(batch.num_sequences - 1), batch.num_sequences - 2]))


def rewards_of_others() -> None:
    """Each rollout has the reward of the one before it."""
    in_batch(lambda batch: replace(batch, rewards=batch.rewards.roll(1)))


def advantages_negated() -> None:
    """Better attempts have lower advantages."""
    from rlframe.algorithms.grpo import Grpo

    changed(Grpo, "advantages", lambda original, algorithm, batch: -original(algorithm, batch))


def positions() -> None:
    """The engine numbers the positions of sampled tokens wrongly."""
    from rlframe.rollout.transformers.decode import DecodeLoop

    def forward(original: Any, loop: Any, tokens: Any, where: Any) -> Any:
        return original(loop, tokens, where + 5 if tokens.shape[1] == 1 else where)

    changed(DecodeLoop, "forward", forward)


def no_seeds() -> None:
    """The engine draws by chance."""
    from rlframe.rollout.transformers import decode

    changed(decode, "uniforms", lambda _, seeds, __: torch.rand(len(seeds), dtype=torch.float64))


def one_seed() -> None:
    """The engine draws by the same seed for each request."""
    from rlframe.rollout.transformers import decode

    changed(decode, "uniforms", lambda original, seeds, at: original(torch.zeros_like(seeds), at))


def other_reference() -> None:
    """The reference is not what the policy started from."""

    def plant(trainer: Any) -> None:
        for kept in trainer.reference.kept:
            kept.mul_(1.01)

    in_trainer(plant)


def learning() -> None:
    """The optimizer has a learning rate."""

    def plant(_: Any) -> None:
        from rlframe.megatron.worker import optimizer

        changed(optimizer, "learning_rate", lambda *_: 1e-4)

    in_trainer(plant)


def noise() -> None:
    """The trainer's forward pass is not deterministic."""

    def plant(_: Any) -> None:
        from rlframe.megatron.model import forward

        def compute(original: Any, *arguments: Any, **named: Any) -> Any:
            return [each + 1e-4 * torch.randn_like(each) for each in original(*arguments, **named)]

        changed(forward, "compute_logprobs", compute)

    in_trainer(plant)


def leak() -> None:
    """A rank of the policy keeps something of every step."""

    def plant(trainer: Any) -> None:
        from rlframe.megatron.worker.trainer import Trainer

        def fingerprint(original: Any, mine: Any) -> Any:
            trainer.kept = [*getattr(trainer, "kept", []), bytearray(os.urandom(1024)) * (LEAK_BYTES // 1024)]
            return original(mine)

        changed(Trainer, "fingerprint", fingerprint)

    in_trainer(plant)


def rounded_head() -> None:
    """The engine's head rounds to bfloat16 and scales its logits."""

    def plant(engine: Any) -> None:
        engine.model.lm_head.register_forward_hook(lambda _, __, logits: (logits.bfloat16() * 1.01).to(logits.dtype))

    in_engine(plant)


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        engine_temperature, trainer_temperature, sharpened_samples, stale_layer, second_copy, blind_proof,
        skipped_layer, wrong_routes, off_by_one, prompt_in_mask, last_token_lost, dropped_end, doubled_token,
        rewards_of_others, advantages_negated, positions, no_seeds, one_seed, other_reference, learning, noise, leak,
        rounded_head,
    )
}  # fmt: skip
"""All faults by name."""

if planted := os.environ.get(VARIABLE):
    FAULTS[planted]()
