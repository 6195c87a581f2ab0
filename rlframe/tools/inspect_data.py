"""Shows the data that a run will train on: `python -m rlframe.tools.inspect_data --config-name NAME key=value...`.

Prints the first three samples of the run with the learned tokens marked, the lengths of samples, and records that were
left out with the reason, and what the chat template does to conversations. Ends with status 1 and a sentence if the
data cannot be trained on: a malformed record, or a chat template that opens a turn of the assistant otherwise than it
writes it, with the first token that shows it.
"""

import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlframe.data.curriculum import By
from rlframe.data.kinds import find_source
from rlframe.data.prompts import PromptSource
from rlframe.data.text.special_tokens import special_tokens
from rlframe.data.training import LEFT_OUT, REWRITTEN, SEQUENCES, TrainingSource
from rlframe.models.hub import load_family, read_config, resolve
from rlframe.models.tokenizer import load as load_tokenizer
from rlframe.run.config import RunConfig
from rlframe.run.load import add_arguments, of_arguments
from rlframe.types.prompt import Prompt
from rlframe.types.tokenizer import PreTrainedTokenizerBase
from rlframe.utils.arguments import Parser, run_tool
from rlframe.utils.errors import RlframeError
from rlframe.utils.registry import find
from rlframe.utils.text import printable

SAMPLES = 3
BINS = 10
BAR_WIDTH = 40
LEARNT, PLAIN = "\x1b[32m", "\x1b[0m"
"""Terminal codes for green, and for the default colour."""
MARKS = ("[[", "]]")
"""Marks around learned tokens for output without colours."""
Piece = tuple[str, bool]
"""A text, and whether it is learned."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the data of the run on the command line. Returns the exit status."""
    parser = Parser(prog="python -m rlframe.tools.inspect_data", description=__doc__)
    add_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    try:
        for line in report(of_arguments(options), colours=sys.stdout.isatty(), width=width):
            print(line)
    except RlframeError as error:
        print(printable(str(error)), file=sys.stderr)
        return 1
    return 0


def report(run: RunConfig, *, colours: bool, width: int) -> Iterator[str]:
    """Yields the lines to print.

    Raises:
        ConfigError, DataError, CheckpointError: the run cannot train on its data.
    """
    algorithm = find("rlframe.algorithms", run.algorithm.name, key="algorithm.name")[0](run.algorithm)
    folder = resolve(run.model)
    tokenizer = load_tokenizer(folder, chat_template=run.data.chat_template)
    samples: list[list[tuple[str, list[Piece]]]]
    if algorithm.requirements.data is not None:
        kind = find_source(algorithm.requirements.data)
        positions = load_family(folder).architecture(read_config(folder)).max_positions
        limits = {"max_tokens": run.train.sequence_tokens, "max_positions": positions}
        stream = kind(run.data, tokenizer=tokenizer, seed=run.seed, **limits)
        held_out = len(stream.held_out())
        items = stream.first(len(stream))
        lengths = [item.num_tokens for item in items]
        sequences = [part.token_ids.tolist() for item in items for part in item.parts]
        samples = [
            [
                (title, pieces(part.token_ids.tolist(), (part.weights > 0).tolist(), tokenizer))
                for title, part in zip(stream.titles(item), item.parts, strict=True)
            ]
            for item in stream.next(min(SAMPLES, len(items)))
        ]
        learnt = sum(int((part.weights > 0).sum()) for item in items for part in item.parts)
        what = f"{stream.unit}s"
    else:
        stream = PromptSource(run.data, tokenizer=tokenizer, seed=run.seed)
        held_out = len(stream.evaluation_prompts())
        prompts = stream.first(len(stream))
        lengths = [len(prompt.input) for prompt in prompts]
        sequences = [prompt.input.token_ids.tolist() for prompt in prompts]
        samples = [
            [
                (
                    f"answer {prompt.answer!r}",
                    pieces(prompt.input.token_ids.tolist(), [False] * len(prompt.input), tokenizer),
                )
            ]
            for prompt in _first_of(stream, run)
        ]
        learnt, what = 0, "prompts"
    mark = f"{LEARNT}green{PLAIN}" if colours else "between " + " and ".join(MARKS)
    among = f" in its first {run.data.shuffle_buffer} records" if run.data.streaming else ""
    yield f"{run.data.what}: {len(lengths)} {what} to train on{among}, {held_out} held out"
    yield f"{learnt} of {sum(lengths)} tokens are learned, {mark}" if learnt else "the policy samples the responses"
    yield from _of_template(stream, run)
    for token, count in special_as_text(sequences, tokenizer).items():
        yield f"{token!r} occurs {count} times in the texts of records, as text and not as the special token"
    for number, sample in enumerate(samples, start=1):
        yield ""
        yield f"--- sample {number} of {len(lengths)}"
        yield from side_by_side(sample, colours=colours, width=width)
    yield ""
    yield from histogram(lengths)
    yield ""
    yield from _dropped(stream.dropped)


def _first_of(stream: PromptSource, run: RunConfig) -> list[Prompt]:
    """Returns the prompts that are dealt first, or with stages the first ones of all: a walk over those deals the
    prompts of the present one only, again and again."""
    staged, count = run.data.curriculum is not None and run.data.curriculum.by is By.STAGE, min(SAMPLES, len(stream))
    return stream.first(count) if staged else stream.next(count)


def _of_template(stream: TrainingSource[Any] | PromptSource, run: RunConfig) -> Iterator[str]:
    """Yields what the chat template does to conversations."""
    if run.data.chat_template is not None:
        yield f"the chat template is data.chat_template={run.data.chat_template}, in the place of the model's own"
    if split := stream.counted[REWRITTEN]:
        became = stream.counted[SEQUENCES]
        yield f"{split} conversations, whose earlier turns the chat template rewrites, are {became} sequences"
    if left_out := stream.counted[LEFT_OUT]:
        yield f"{left_out} earlier turns have reasoning that the chat template leaves out, as when it serves the model"


def special_as_text(sequences: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> Counter[str]:
    """Returns by special token how often its text occurs as other tokens."""
    special = special_tokens(tokenizer)
    found: Counter[str] = Counter()
    for token_ids in sequences:
        text = str(tokenizer.decode(token_ids, skip_special_tokens=True))
        found.update({token: text.count(token) for token in special if token in text})
    return found


def pieces(token_ids: list[int], learnt: list[bool], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Returns runs of tokens that are all learned or all not, decoded."""
    found: list[Piece] = []
    start = 0
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or learnt[end] != learnt[start]:
            found.append((printable(str(tokenizer.decode(token_ids[start:end]))), learnt[start]))
            start = end
    return found


def side_by_side(columns: list[tuple[str, list[Piece]]], *, colours: bool, width: int) -> Iterator[str]:
    """Yields two columns next to each other, or a single one line by line."""
    if len(columns) != 2:
        for title, column in columns:
            yield from ([title] if title else []) + [line for line, _ in _wrapped(column, width, colours)]
        return
    half = (width - 3) // 2
    wrapped = [[(title, len(title)), *_wrapped(column, half, colours)] for title, column in columns]
    for row in range(max(map(len, wrapped))):
        left, right = (column[row] if row < len(column) else ("", 0) for column in wrapped)
        yield f"{left[0]}{' ' * (half - left[1])} | {right[0]}".rstrip()


def histogram(lengths: list[int]) -> Iterator[str]:
    """Yields the number of samples of each length, in at most ten classes of equal width."""
    step = max(1, -(-(max(lengths) + 1 - min(lengths)) // BINS))
    counts = [0] * BINS
    for length in lengths:
        counts[(length - min(lengths)) // step] += 1
    yield f"tokens of a sample: {min(lengths)} to {max(lengths)}, {sum(lengths) / len(lengths):.1f} on average"
    while not counts[-1]:
        counts.pop()
    for index, count in enumerate(counts):
        first = min(lengths) + index * step
        bar = "#" * (-(-count * BAR_WIDTH // max(counts)))
        yield f"{first:>7} to {first + step - 1:<7}{count:>8}  {bar}".rstrip()


def _dropped(dropped: Mapping[str, Any]) -> Iterator[str]:
    yield "left out:" if dropped else "left out: nothing"
    for reason, count in sorted(dropped.items(), key=lambda entry: -entry[1]):
        yield f"{count:>8}  {reason}"


def _wrapped(column: list[Piece], width: int, colours: bool) -> list[tuple[str, int]]:
    """Returns lines of at most `width` characters, each with its visible width."""
    opening, closing = (LEARNT, PLAIN) if colours else MARKS
    unseen = len(opening) + len(closing) if colours else 0
    lines: list[tuple[str, int]] = []
    line, seen = "", 0
    for text, learnt in column:
        for place, part in enumerate(text.split("\n")):
            if place:
                lines.append((line, seen))
                line, seen = "", 0
            while part:
                around = len(MARKS[0] + MARKS[1]) if learnt and not colours else 0
                room = width - seen - around
                if room < 1:
                    lines.append((line, seen))
                    line, seen = "", 0
                    continue
                shown, part = part[:room], part[room:]
                shown = f"{opening}{shown}{closing}" if learnt else shown
                line, seen = line + shown, seen + len(shown) - (unseen if learnt else 0)
    return [*lines, (line, seen)]


if __name__ == "__main__":
    run_tool(main)
