"""Faults at the endpoint of agents."""

from tests.mutations.mutation import Mutation, faults

CHAT = "tests/unit/attempts/endpoint/test_chat.py"
CONVERSATION = "tests/unit/attempts/endpoint/test_conversation.py"
AGENTS = "tests/unit/attempts/endpoint/test_agents.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/attempts/endpoint/conversation.py",
        CONVERSATION,
        (
            "a second call after the same answer is appended to the first",
            "if after is not None and _is_last(after):",
            "if after is not None:",
        ),
        ("no call goes on after another", "if found := self._known.get(keys[index + 1]):", "if found := None:"),
        ("the offered tools do not matter", 'keys = [_digest(b"", tools)]', 'keys = [_digest(b"", [])]'),
        ("the last sequence is the one begun last", "key=lambda each: each.last)]", "key=lambda each: 0)]"),
        ("the ids of calls are the agent's", "return message if own is None else", "return message if True else"),
    ),
    *faults(
        "rlframe/attempts/endpoint/server.py",
        CHAT,
        ("any key will do at the endpoint", "if not known or not hmac.compare_digest(", "if not known or hmac is ("),
    ),
    *faults(
        "rlframe/attempts/endpoint/desk.py",
        CHAT,
        (
            "an agent's limit of tokens is ignored",
            "min(given.max_tokens, asked.max_tokens or given.max_tokens)",
            "given.max_tokens",
        ),
        (
            "an interrupted response of an agent begins again",
            "input, begun = input.then(completion.token_ids), begun + len(completion.token_ids)",
            "pass",
        ),
        ("a limit of an agent is counted at each call", "if self.limit is None:", "if True:"),
        ("calls go on after the end of their attempt", "            task.cancel()", "            pass"),
    ),
    *faults(
        "rlframe/attempts/endpoint/agents.py",
        AGENTS,
        ("an agent without a call for long goes on", "if desk.idle_s > limit_s:", "if False:"),
        ("an agent that never called is trained on", "elif not desk.was_answered:", "elif False:"),
    ),
]
