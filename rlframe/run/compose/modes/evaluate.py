"""Composes mode=evaluate: what training would evaluate, with the weights of model.path."""

import time
from collections.abc import Mapping
from dataclasses import replace

from rlframe.algorithms.base import Algorithm, OfflineAlgorithm
from rlframe.data.prompts import PromptSource
from rlframe.loops.config import HELD_OUT, LoggingConfig
from rlframe.loops.evaluation.evaluate import evaluate_streaming
from rlframe.loops.evaluation.results import (
    RESPONSES,
    RESULTS,
    Result,
    result_of,
    table,
    told,
    write_responses,
    write_results,
)
from rlframe.loops.resuming import Resumption
from rlframe.run.compose.frozen import frozen
from rlframe.run.compose.offline import offline
from rlframe.run.compose.parts import Parts
from rlframe.run.compose.sets import evaluation_sets
from rlframe.utils.errors import ConfigError
from rlframe.utils.faults import Fault
from rlframe.utils.process import garbage
from rlframe.utils.text import print_line


def evaluate(parts: Parts, algorithm: Algorithm) -> dict[str, float]:
    """Evaluates, writes `results.json` and prints a table. Returns the numbers of the table as `after/...`, and
    `after/NAME/...` of sets with a name."""
    if isinstance(algorithm, OfflineAlgorithm):
        results = _losses(parts, algorithm)
        files = f"{RESULTS}, metrics.jsonl"
    else:
        results = _responses(parts)
        files = f"{RESULTS}, {RESPONSES}"
    print_line(f"{parts.config.model.path}:\n{table(results)}\nIn {parts.folder}: {files}, config.yaml, logs/.")
    return {
        f"after/{name}" if own == HELD_OUT else f"after/{own}/{name}": value
        for own, result in results.items()
        for name, value in result.metrics.items()
        if name in told(result.metrics)
    }


def _responses(parts: Parts) -> Mapping[str, Result]:
    """Evaluates responses that engines sample."""
    config = parts.config
    prompts = PromptSource(config.data, tokenizer=parts.tokenizer, seed=config.seed) if config.data.holds_out else None
    sets = evaluation_sets(parts, prompts)
    if not sets:
        raise _nothing(parts)
    parts.start_up.done("data")
    engines = frozen(parts, rewarded=True)
    began = time.monotonic()
    evaluated = evaluate_streaming(engines.attempts, engines.scorer, sets, progress=config.logging.progress)
    results = {each.set.name: result_of(each) for each in evaluated}
    write_responses(parts.folder, evaluated)
    _write(parts, results, began)
    return results


def _losses(parts: Parts, algorithm: OfflineAlgorithm) -> Mapping[str, Result]:
    """Evaluates the loss on held-out items, in the policy's ranks."""
    # A progress bar and trackers are for runs.
    parts.config = replace(parts.config, logging=LoggingConfig(progress=False, tensorboard=False))
    loop = offline(parts, algorithm)
    garbage.release()
    if not (items := loop.examples.held_out()):
        raise _nothing(parts)
    Resumption(parts.config.checkpoint, loop, parts.checkpoints, parts.groups).resume()
    parts.start_up.done("preparation")
    parts.start_up.over()
    began = time.monotonic()
    loop.evaluate(0)
    metrics = {key.removeprefix("before/"): value for key, value in loop.results.items() if key.startswith("before/")}
    results = {HELD_OUT: Result(count=len(items), metrics=metrics)}
    _write(parts, results, began)
    return results


def _write(parts: Parts, results: Mapping[str, Result], began: float) -> None:
    """Writes the results of an evaluation that began at `began`."""
    seconds = {"start": parts.start_up.parts, "evaluation": time.monotonic() - began}
    write_results(parts.folder, results, model=parts.config.model.path, seconds=seconds)


def _nothing(parts: Parts) -> ConfigError:
    data = parts.config.data
    return ConfigError(
        [
            Fault(
                "data.evaluation_path",
                "must name records to evaluate",
                why=f"of {data.what} nothing is held out: at most a tenth of its records would be",
                hint="or name a set with evaluation.sets.NAME.path",
            )
        ]
    )
