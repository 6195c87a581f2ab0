"""Composes mode=generate: responses of model.path to all prompts of data.path."""

import logging
import time
from collections.abc import Sequence

from rlframe.data import builtin
from rlframe.data.sets import read_prompts, settings_of
from rlframe.loops.evaluation.generate import Generation
from rlframe.run.check.roles.reward import needing_answers
from rlframe.run.compose.frozen import frozen
from rlframe.run.compose.parts import Parts
from rlframe.types.prompt import Prompt
from rlframe.utils.text import print_line

logger = logging.getLogger(__name__)
RESPONSES = "responses.jsonl"
"""File of the responses: a line for each prompt."""


def generate(parts: Parts) -> dict[str, float]:
    """Writes responses to the prompts of data.path that have none yet. Returns no metrics."""
    config = parts.config
    data = settings_of(config.data, config.data.path)
    salt = f"subset {config.seed}"
    prompts, ids = read_prompts(data, tokenizer=parts.tokenizer, part=builtin.Split.TRAIN, salt=salt)
    parts.start_up.done("data")
    engines = frozen(parts, rewarded=judged(parts, prompts))
    began = time.monotonic()
    generation = Generation(
        attempts=engines.attempts,
        scorer=engines.scorer,
        file=parts.folder / RESPONSES,
        sampling=config.generation.sampling(max_tokens=config.rollout.max_tokens, stop=config.rollout.stop),
        samples_per_prompt=config.generation.samples_per_prompt,
        progress=config.logging.progress,
    )
    generation.run(prompts, ids)
    written = generation.num_written
    there = f"; {len(ids) - written} were there" if written < len(ids) else ""
    times = f"{time.monotonic() - began:.1f} s after a start of {parts.start_up}"
    print_line(f"{config.name}: {written} prompts answered in {times}{there}.")
    if faults := generation.faults():
        again = "to sample their prompts again, delete the lines of these from it and start the same command"
        print_line(f"warning: in all of {RESPONSES} {faults}; {again}")
    print_line(f"In {parts.folder}: {RESPONSES}, config.yaml, logs/.")
    return {}


def judged(parts: Parts, prompts: Sequence[Prompt]) -> bool:
    """Returns whether the responses can be judged: there are rewards, and answers if a reward compares with them."""
    config = parts.config
    needing = needing_answers(config)
    without = sum(prompt.answer is None for prompt in prompts) if needing else 0
    if without:
        logger.info(
            "%d of %d prompts have no answer, with which reward.parts.%s compares: no response is judged",
            without, len(prompts), needing[0],
        )  # fmt: skip
    return bool(config.reward_names) and not without
