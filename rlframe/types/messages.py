"""Messages: the turns of a conversation, in the form that chat templates and the OpenAI API share."""

from typing import Any

Message = dict[str, Any]
"""`role` (system, user, assistant or tool) and `content` (text). An assistant's message may also have
`reasoning_content` (text) and `tool_calls`, a tool's `name` and `tool_call_id`.

Example:
    >>> {"role": "user", "content": "What is 12 * 13?"}
    >>> {"role": "assistant", "content": "", "tool_calls": [
    ...     {"id": "0", "type": "function", "function": {"name": "calculator", "arguments": {"expression": "12*13"}}}]}
    >>> {"role": "tool", "name": "calculator", "tool_call_id": "0", "content": "156"}
"""
