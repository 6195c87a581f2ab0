"""Faults in what turns messages into tokens and sampled tokens into messages."""

from tests.mutations.mutation import Mutation, faults

RENDERER = "tests/unit/attempts/rendering/test_renderer.py"
FORMATS = "tests/unit/attempts/rendering/test_formats.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/attempts/rendering/renderer.py",
        RENDERER,
        ("the end of a turn is appended twice", "if ids and ids[-1] in {", "if False and ids[-1] in {"),
        ("the end of a turn is never appended", "if ids and ids[-1] in {", "if True or ids[-1] in {"),
        ("a fork is never seen", "if fork is not None:", "if False:"),
        (
            "every turn that is formatted otherwise forks",
            "if turn.startswith(opened.text.rstrip()) and full.text.startswith(turn):",
            "if False:",
        ),
        (
            "what the template kept forks",
            "if full.text.startswith(opened.text + said):",
            "if full.text == opened.text + said:",
        ),
        ("parts of a conversation are not proved", "whole[-len(appended) :] != appended", "False"),
        ("malformed calls are lost", "content.append(call.text)", "pass"),
        (
            "a turn that the template refuses is a call",
            "(refusal := self._refusal(reply.message, tools)):",
            "(refusal := None):",
        ),
        (
            "a template that refuses every turn makes calls malformed",
            "return None\n        return refusal",
            "pass\n        return refusal",
        ),
        ("an unknown form of calls is taken", "if tools and isinstance(self._chosen, SettingError):", "if False:"),
    ),
    *faults(
        "rlframe/attempts/rendering/sampled.py",
        RENDERER,
        ("a spelled special token is one", "marks = marks_for(texts[::2], tokenizer)", "marks = {}"),
    ),
    *faults(
        "rlframe/attempts/rendering/tail.py",
        RENDERER,
        ("a message may be dropped", "if words and not any(word in rest.text for word in words):", "if False:"),
        ("the sentinel may stand twice", "if len(parts) != 2:", "if len(parts) < 2:"),
        ("white space before an end is lost", "space = spaced[: len(spaced) - len(rest)]", 'space = ""'),
    ),
    *faults(
        "rlframe/attempts/rendering/reply.py",
        FORMATS,
        ("a required argument may be absent", "if name not in call.arguments]", "if False]"),
        ("an unknown tool is called", "if call.name not in tools:", "if False:"),
        ("all calls have one id", 'salt=index.to_bytes(8, "little")', 'salt=b""'),
    ),
    *faults(
        "rlframe/attempts/rendering/formats/base.py",
        FORMATS,
        (
            "bare text that reads like a number is one",
            'return text if "string" in kinds and not kinds & KINDS.get(type(value), set()) else value',
            "return value",
        ),
    ),
    *faults(
        "rlframe/data/text/template.py",
        "tests/unit/data/text/test_template.py",
        ("a keyword of the template may be set in vain", "elif name not in read:", "elif False:"),
        ("a keyword of rlframe's own may be set", "if name in taken:", "if False:"),
    ),
    *faults(
        "rlframe/data/text/chat.py",
        "tests/unit/data/text/test_template.py",
        ("keywords do not reach the template", "**kwargs_of(config),", ""),
    ),
]
