"""Says before a run starts whether it fits its devices and how long a step takes.

`python -m rlframe.tools.plan --config-name NAME key=value...` needs the model's config.json, but no device, engine or
weights. It prints the faults of the configuration, how the batch is divided, the memory of each device by phase, what
to change if it does not fit, the seconds of a step, and the three fastest layouts for the same devices. Ends with
status 1 if the run does not fit or its configuration has faults.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rlframe.cluster.config import Device
from rlframe.cluster.roles import ENGINES
from rlframe.run.check import faults_of_settings, planned_faults
from rlframe.run.check.context import algorithm_of
from rlframe.run.config import Mode, RunConfig
from rlframe.run.load import add_arguments, of_arguments
from rlframe.run.preflight.advice import faults_of
from rlframe.run.preflight.describe import describe, facts, labelled
from rlframe.run.preflight.devices import KINDS, Accelerator, this_machine
from rlframe.run.preflight.layouts import Layout, best
from rlframe.run.preflight.plan import Plan, plan
from rlframe.tools.plan_sync import Case, by_medium, solve
from rlframe.utils.arguments import Parser, run_tool
from rlframe.utils.errors import ConfigError, RlframeError
from rlframe.utils.faults import Fault
from rlframe.utils.files.whole import writing
from rlframe.utils.text import printable

PLANNED = (Mode.TRAIN, Mode.SELF_TEST)
"""Modes that train: the steps of a self test are those of a run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the plan of the run on the command line. Returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    accelerator = KINDS[options.device] if options.device else this_machine()
    try:
        run = on(accelerator, of_arguments(options))
        if run.mode not in PLANNED:
            raise ConfigError([unplanned(run)])
        faults = planned_faults(run)
        found = plan(
            run,
            algorithm_of(run),
            accelerator,
            response_tokens=options.response_tokens,
            prompt_tokens=options.prompt_tokens,
            devices_per_host=options.devices_per_host,
            rules=faults_of_settings,
        )
        if faults_of(found):
            # Nothing can be counted in a layout that does not divide the model.
            raise ConfigError(faults)
        layouts = best_layouts(found, options.devices)
        for line in describe(found, faults, layouts, given=options.devices):
            print(line)
        if options.links:
            for line in labelled("links", links(found, options.devices_per_host)):
                print(line)
        if options.json:
            with writing(Path(options.json)):
                Path(options.json).write_text(json.dumps(facts(found, faults, layouts), indent=1) + "\n")
    except RlframeError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    return 0 if found.fits and not faults else 1


def unplanned(run: RunConfig) -> Fault:
    """Returns the fault of a run that trains nothing."""
    return Fault(
        "mode",
        f"must be {' or '.join(PLANNED)}",
        got=run.mode,
        why="without a trainer there is nothing to lay out: each engine takes rollout.gpu_memory_utilization of its "
        "devices, and refuses at its start a model that does not fit there",
        hint="remove it to plan the training of the same model",
    )


def best_layouts(found: Plan, given: int | None) -> list[Layout]:
    """Returns the fastest layouts on the given devices, or on as many as the run needs."""
    return best(found, given or found.num_devices) if found.accelerator.speeds else []


def links(found: Plan, devices_per_host: int) -> Iterator[str]:
    """Yields the bytes of a weight sync over each kind of link, and their seconds, from the plan of the real sync.

    Raises:
        ConfigError: the run has no engines that are synced, or the engine is not installed here.
    """
    engine = found.engine
    if engine is None or engine.role != ENGINES:
        raise ConfigError(["--links: no engine of this run receives weights of the trainer; remove it"])
    case = Case(
        model=found.run.model.path,
        train=found.parallel,
        engine=found.run.rollout.name,
        tp=engine.config.devices_per_engine,
        ep=getattr(engine.config, "expert_parallel", False),
        engines=engine.config.num_engines,
        colocate=found.run.cluster.colocate,
        dtype=str(found.run.train.dtype),
        devices_per_host=devices_per_host,
    )
    answer = solve(case)
    yield from by_medium(answer)
    seconds = answer.seconds["plan_s"]
    yield f"{answer.plan.num_copies:,} copies, planned in {seconds:.1f} s; all links at once: {answer.floor_ms:.3g} ms"
    if answer.fallback:
        yield f"everything goes as whole tensors through the engine's reload: {answer.fallback}"


def on(accelerator: Accelerator, run: RunConfig) -> RunConfig:
    """Returns the run on such devices, whatever this machine has, without its weights."""
    device = Device.CPU if accelerator.is_cpu else Device.CUDA
    # With random_init a hub model's small files are enough.
    return replace(run, cluster=replace(run.cluster, device=device), model=replace(run.model, random_init=True))


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text}")
    return int(text)


def _parser() -> Parser:
    parser = Parser(
        prog="python -m rlframe.tools.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=sorted(KINDS), help="the kind of device (default: that of this machine)")
    add("--devices", type=_count, help="number of devices for the best layouts (default: what the run needs)")
    add("--devices-per-host", type=_count, default=8, help="default %(default)s")
    add("--prompt-tokens", type=_count, help="mean tokens of a prompt (default: data.max_prompt_tokens)")
    add("--response-tokens", type=_count, help="mean tokens of a response (default: rollout.max_tokens)")
    add("--links", action="store_true", help="plan the weight sync with the engine's own loader: bytes by kind of link")
    add("--json", metavar="FILE", help="write everything as JSON too")
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    run_tool(main)
