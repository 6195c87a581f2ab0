"""Random conversations that a family's template can write, and what a policy samples in them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from rlframe.attempts.rendering.renderer import Renderer
from rlframe.data.text.chat import encode
from rlframe.data.text.special_tokens import Rendering
from rlframe.data.text.tool_calls import Tool
from rlframe.types.messages import Message
from tests.unit.attempts.rendering.families import Family

SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "text": {"type": "string"},
        "table": {"type": "object"},
        "row": {"type": "array"},
        "share": {"type": "number"},
        "strict": {"type": "boolean"},
    },
    "required": ["count"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": SCHEMA}}
    for name in ("look_up", "add")
]
SNIPPETS = [
    "a",
    "7",
    " ",
    "\n",
    "the",
    "{",
    "}",
    '"',
    "\\",
    "\u00e9",
    "\u6f22",
    "\U0001f642",
    "<",
    "|>",
    "null",
    "True",
    ": ",
    "'",
]
BEGUN = (("<think>\n", "\n</think>\n\n"), ("<|channel>thought\n", "\n<channel|>"))
"""Beginnings of reasoning that templates write for the policy, and what it samples at the end of it."""
LETTERS = "abcdefgXYZ_"


def texts(family: Family, *, most: int = 8) -> st.SearchStrategy[str]:
    """Text without white space at its ends, in which special tokens may be spelled."""
    pieces = st.lists(st.sampled_from([*SNIPPETS, *family.special]), max_size=most)
    return pieces.map(lambda parts: "".join(parts).strip())


def arguments(family: Family) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments that fit SCHEMA."""
    numbers = st.integers(-(10**20), 10**20)
    shares = st.floats(allow_nan=False, allow_infinity=False)
    leaves = st.one_of(st.none(), st.booleans(), numbers, texts(family))
    keys = st.text(LETTERS, min_size=1, max_size=5)
    return st.fixed_dictionaries(
        {"count": numbers},
        optional={
            "text": texts(family),
            "table": st.dictionaries(keys, st.one_of(leaves, st.lists(leaves, max_size=2)), max_size=3),
            "row": st.lists(leaves, max_size=3),
            "share": shares,
            "strict": st.booleans(),
        },
    )


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the assistant, and the messages that follow it."""

    said: Message
    new: tuple[Message, ...]


@st.composite
def turns(draw: st.DrawFn, family: Family, number: int, *, after_calls: bool) -> Turn:
    """A turn with calls and answers to them, or one without and a user's message."""
    # DeepSeek's template writes a second round of calls without its beginning, and no reasoning after answers.
    halting = after_calls and not family.lists_tools
    count = 0 if halting else draw(st.integers(0, family.calls))
    said: Message = {"role": "assistant", "content": ""}
    if not count or family.both:
        said["content"] = draw(texts(family)) or ("" if count else "well")
    if family.reasons and not halting and (thought := draw(texts(family))):
        said["reasoning_content"] = thought
    if not count:
        return Turn(said, ({"role": "user", "content": draw(texts(family)) or "go on"},))
    said["tool_calls"] = [
        {
            "id": f"call{number}{index}ids"[:9],
            "type": "function",
            "function": {"name": draw(st.sampled_from(["look_up", "add"])), "arguments": draw(arguments(family))},
        }
        for index in range(count)
    ]
    answers = [
        {"role": "tool", "content": draw(texts(family)) or "nothing", "tool_call_id": call["id"]}
        for call in said["tool_calls"]
    ]
    return Turn(said, tuple(answers))


@dataclass(frozen=True, slots=True)
class Scene:
    """The beginning of a conversation and its turns."""

    start: tuple[Message, ...]
    turns: tuple[Turn, ...]


@st.composite
def scenes(draw: st.DrawFn, family: Family) -> Scene:
    """A conversation of one to three turns."""
    start: list[Message] = [{"role": "user", "content": draw(texts(family)) or "hello"}]
    if draw(st.booleans()):
        start.insert(0, {"role": "system", "content": draw(texts(family)) or "be brief"})
    made: list[Turn] = []
    for number in range(draw(st.integers(1, 3))):
        called = any("tool_calls" in turn.said for turn in made)
        made.append(draw(turns(family, number, after_calls=called)))
    return Scene(tuple(start), tuple(made))


def sampled(family: Family, renderer: Renderer, before: list[Message], turn: Turn) -> list[int]:
    """What a policy samples that says the turn as the template writes it."""
    tools = TOOLS if family.lists_tools and family.calls else ()
    head, closed = renderings(renderer, before, turn.said, tools)
    thought, ending = "", ""
    for opening, closing in BEGUN:
        if head.endswith(opening) and not closed.text.startswith(head):
            # The template begins the reasoning for the policy, and would write none.
            head, thought, ending = head.removesuffix(opening), turn.said.get("reasoning_content", ""), closing
    if not closed.text.startswith(head):
        # It rewrites what is before the turn. What it writes of the turn does not depend on that.
        head, closed = renderings(renderer, [{"role": "user", "content": "x"}], turn.said, tools)
    assert closed.text.startswith(head), (head, closed.text)
    # Special tokens that are spelled stay so: the marks are those of the closed conversation.
    for mark, token in closed.marks.items():
        thought = thought.replace(token, mark)
    said = thought + ending + closed.marked[_length_in_marked(closed, len(head)) :].rstrip()
    tokenizer = renderer._tokenizer
    (ids,) = encode(tokenizer, [Rendering(marked=said, where="sampled", marks=closed.marks)])
    if family.ends:
        ids.append(tokenizer.convert_tokens_to_ids(family.ends["tool_calls" in turn.said]))
    return ids


def renderings(
    renderer: Renderer, before: list[Message], said: Message, tools: Sequence[Tool]
) -> tuple[str, Rendering]:
    """The conversation with an opened turn as text, and with the turn."""
    opened = renderer._render(before, tools, opened=True)
    return opened.text, renderer._render([*before, said], tools, opened=False)


def _length_in_marked(rendering: Rendering, length: int) -> int:
    """Number of characters with marks that are `length` characters without."""
    known = "|".join(map(re.escape, rendering.marks)) or "$^"
    at = 0
    for piece in re.split(f"({known})", rendering.marked):
        plain = rendering.with_marks_as(piece)
        if length < len(plain) or not length:
            assert plain == piece or not length, "the border lies in a mark"
            return at + length
        at, length = at + len(piece), length - len(plain)
    return at
