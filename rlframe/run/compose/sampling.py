"""The sampler of the algorithm, and the source of responses that the policy does not sample."""

import math
from collections.abc import Mapping
from functools import partial

from rlframe.algorithms.base import OnlineAlgorithm
from rlframe.algorithms.dynamic_sampling import DynamicSamplingConfig
from rlframe.algorithms.requirements import GivenResponses, Writer
from rlframe.attempts.account.leases import Leases
from rlframe.attempts.buffer import Buffer
from rlframe.attempts.fleet import Attempts
from rlframe.attempts.mending import Mender
from rlframe.data.prompts import PromptSource
from rlframe.data.text.turns import Tokens
from rlframe.loops.phases import Phases
from rlframe.loops.reporting.timeline import Timeline
from rlframe.loops.sampling.base import Sampler
from rlframe.loops.sampling.buffered import BufferedSampler
from rlframe.loops.sampling.mixed import DataResponses, MixedSampler, ResponseSource, TeacherResponses, responses
from rlframe.loops.sampling.scoring import Scorer
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.rollout.fleet.teacher import TeacherEngines
from rlframe.run.compose import models
from rlframe.run.compose.parts import Parts


def given_responses(parts: Parts, prompts: PromptSource) -> Mapping[str, Tokens]:
    """Returns the data's response to each prompt, where some steps train on them; else nothing."""
    config, sampling = parts.config, parts.requirements.sampling
    if not isinstance(sampling, GivenResponses) or sampling.writer is not Writer.DATA:
        return {}
    folder = resolve(config.model)
    return responses(
        config.data,
        prompts,
        tokenizer=parts.tokenizer,
        seed=config.seed,
        max_tokens=config.train.sequence_tokens,
        max_positions=load_family(folder).architecture(read_config(folder)).max_positions,
    )


def sampler(
    parts: Parts,
    algorithm: OnlineAlgorithm,
    *,
    leases: Leases,
    attempts: Attempts,
    scorer: Scorer | None,
    phase: Phases,
    examples: Mapping[str, Tokens],
    engines: TeacherEngines | None,
    mender: Mender | None,
    timeline: Timeline,
) -> Sampler:
    """Returns the sampler of the algorithm's rollouts.

    Args:
        examples: the result of `given_responses`.
        engines: the teacher's engines.
        mender: brings the policy's engines back that die while it trains.
        timeline: notes how busy engines are that sample all the time.
    """
    config, sampling = parts.config, parts.requirements.sampling
    common = {
        "leases": leases,
        "attempts": attempts,
        "scorer": scorer,
        "phase": phase,
        "prompts_per_step": config.prompts_per_step,
        "group_size": algorithm.group_size,
    }
    num_minibatches = minibatches_of(parts)
    if sampling is None or isinstance(sampling, DynamicSamplingConfig):
        buffer = Buffer(
            prompts_per_step=config.prompts_per_step,
            max_policy_lag=config.loop.max_policy_lag,
            pipeline_depth=config.loop.pipeline_depth,
            oversample=config.rollout.oversample,
            rest=config.rollout.oversample_rest,
        )
        return BufferedSampler(
            **common,
            buffer=buffer,
            last_step=config.steps,
            dynamic=sampling,
            mender=mender,
            num_minibatches=num_minibatches,
            timeline=timeline,
        )
    if isinstance(sampling, GivenResponses):
        response_source = _response_source(parts, sampling.writer, examples, engines)
        return MixedSampler(
            **common,
            response_source=response_source,
            samples=partial(sampling.samples, config.seed),
            num_minibatches=num_minibatches,
        )
    return sampling(**common)


def minibatches_of(parts: Parts) -> int:
    """Returns the number of groups of which a batch that does not get full keeps a multiple."""
    own = parts.config.train.num_minibatches
    return math.lcm(own, parts.config.critic_train.num_minibatches) if parts.requirements.critic else own


def _response_source(
    parts: Parts, writer: Writer, examples: Mapping[str, Tokens], engines: TeacherEngines | None
) -> ResponseSource:
    if writer is Writer.DATA:
        return DataResponses(examples=examples, tokenizer=parts.tokenizer)
    assert engines is not None, "refused by config.check"
    attempts = models.attempts(parts, engines, role="teacher_runner", rewarded=False)
    return TeacherResponses(attempts=attempts, sampling=parts.config.rollout.sampling())
