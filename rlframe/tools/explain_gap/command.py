"""The command line of explain_gap."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlframe.config.load import composed
from rlframe.data import builtin
from rlframe.data.sets import read_prompts, settings_of
from rlframe.models import tokenizer
from rlframe.models.hub import resolve
from rlframe.run.config import RunConfig
from rlframe.run.load import add_arguments
from rlframe.tools.explain_gap.answer import facts, remedies, table
from rlframe.tools.explain_gap.ladder import Climb, Ladder, Limits
from rlframe.tools.explain_gap.rest import describe
from rlframe.tools.explain_gap.rung import Rung
from rlframe.tools.explain_gap.rungs import rungs
from rlframe.tools.explain_gap.running import running
from rlframe.tools.explain_gap.settings import Settings
from rlframe.types.prompt import Prompt
from rlframe.utils.arguments import Parser
from rlframe.utils.errors import RlframeError, UsageError
from rlframe.utils.faults import Fault
from rlframe.utils.files.whole import write_whole, writing
from rlframe.utils.nearest import did_you_mean
from rlframe.utils.text import printable

ABOUT = """Tells why the engine's logprobs differ from the trainer's.

Samples responses to fixed prompts once, then takes possible causes away one after the other, on both sides, and
measures the mean of |trainer - engine| over the sampled tokens after each. Starts Ray, the policy's ranks and one
engine, which is started again for causes that are its settings. Nothing is trained."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what explains the gap of the run on the command line. Returns the exit status."""
    began = time.monotonic()
    options = parser().parse_intermixed_args(arguments)
    try:
        require_counts(options)
        chosen = without(options.skip)
        values = composed(options.config_name, options.overrides, config_dir=options.config_dir)
        folder = Path(str(values["output"])).absolute() / "explain_gap"
        output = options.output or folder / "gap.json"
        settings = Settings(values, output=str(folder))
        make_room(output)
        prompts = prompts_of(settings.subject.run, options.prompts, options.num_prompts)
        explain(settings, prompts, chosen, options, output=output, began=began)
    except RlframeError as error:
        print(printable(str(error)), file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def explain(
    settings: Settings,
    prompts: Sequence[Prompt],
    chosen: Sequence[Rung],
    options: argparse.Namespace,
    *,
    output: Path,
    began: float,
) -> None:
    """Measures rung by rung, writes the answer after each, and prints it."""
    command: dict[str, Any] = {"config_name": options.config_name, "overrides": options.overrides}

    def write(climb: Climb, **others: Any) -> None:
        seconds = {"total_s": time.monotonic() - began, "engine_starts": sides.num_engine_starts}
        text = json.dumps(facts(climb, chosen, command=command, **seconds, **others), indent=1)
        write_whole(output, f"{text}\n".encode())

    def tell(climb: Climb) -> None:
        write(climb)
        step = climb.steps[-1] if climb.steps else None
        name = " + ".join(step.names) if step else "as configured"
        state = f"{climb.rest.mean_nats:.6f} nats" if step is None or step.after else f"not climbed: {step.skipped}"
        print(printable(f"{time.monotonic() - began:6.1f} s  {name}: {state}"), file=sys.stderr, flush=True)

    with ExitStack() as stack:
        sides = running(settings, prompts, stack, samples_per_prompt=options.samples, max_tokens=options.max_tokens)
        ladder = Ladder(
            sides,
            settings.subject,
            chosen,
            impossible=settings.faults,
            limits=Limits(engine_starts=options.engine_starts, seconds=options.limit_s),
            began=began,
            tell=tell,
        )
        climb = ladder.climb()
        remains = describe(ladder.sample, ladder.engine_nats, ladder.trainer_nats)
        write(climb, rest_says=remains)
    for line in (*table(climb), *remains, "", *remedies(climb, chosen), f"written to {output}"):
        print(printable(line))


def require_counts(options: argparse.Namespace) -> None:
    """Refuses numbers that leave nothing to compare.

    Raises:
        UsageError: a number is too small.
    """
    for name in ("num_prompts", "samples", "max_tokens", "engine_starts"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UsageError(str(Fault(f"--{name.replace('_', '-')}", "must be at least 1", got=value)))


def make_room(output: Path) -> None:
    """Creates the folder of the answer.

    Raises:
        UsageError: the answer cannot be a file there.
        OutputError: the folder cannot be created.
    """
    if output.is_dir():
        raise UsageError(str(Fault("--output", "must be a file", got=f"the folder {output}")))
    with writing(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)


def prompts_of(run: RunConfig, path: str | None, count: int) -> list[Prompt]:
    """Returns the first prompts of the run's data, or of a file that is read like it."""
    data = settings_of(run.data, run.data.path if path is None else path)
    words = tokenizer.load(resolve(run.model), chat_template=run.data.chat_template)
    found, _ = read_prompts(data, tokenizer=words, part=builtin.Split.TRAIN, salt=f"subset {run.seed}")
    return [found[place] for place in range(min(count, len(found)))]


def without(names: Sequence[str]) -> list[Rung]:
    """Returns all rungs but those of `names`.

    Raises:
        UsageError: there is no such rung.
    """
    found = rungs()
    known = [rung.name for rung in found]
    for name in names:
        if name not in known:
            raise UsageError(
                str(Fault("--skip", f"must be among {', '.join(known)}", got=name, hint=did_you_mean(name, known)))
            )
    return [rung for rung in found if rung.name not in names]


def parser() -> Parser:
    """Returns the parser of the command line."""
    lines = "\n".join(f"  {rung.name:<16} {rung.question}" for rung in rungs())
    made = Parser(
        prog="python -m rlframe.tools.explain_gap",
        description=ABOUT,
        epilog=f"rungs, in their order; each stays switched:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    limits = Limits()
    add = made.add_argument
    add("--prompts", metavar="FILE", help="prompts of this dataset, read as data.path would be (default: data.path)")
    add("--num-prompts", type=int, default=16, help="number of prompts (default %(default)s)")
    add("--samples", type=int, default=4, help="responses to each prompt (default %(default)s)")
    add("--max-tokens", type=int, help="limit of a response (default: rollout.max_tokens)")
    add("--engine-starts", type=int, default=limits.engine_starts, help="most engine starts (default %(default)s)")
    add("--limit-s", type=float, help="seconds after which only the last rung starts an engine")
    add("--skip", type=lambda text: text.split(","), default=[], metavar="RUNG,RUNG", help="rungs to leave out")
    add("--output", type=Path, metavar="FILE", help="JSON of the answer (default: OUTPUT/explain_gap/gap.json)")
    add_arguments(made)
    return made
