"""An agent that answers with the openai client and a calculator: a function and a program.

python -m rlframe.main --config-name grpo_calculator environment=endpoint \
    environment.options.function=examples/agents/calculator.py:answer name=agent_function
python -m rlframe.main --config-name grpo_calculator environment=endpoint \
    environment.options.command=[python,examples/agents/calculator.py] name=agent_command
"""

import ast
import asyncio
import json
import operator
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openai import AsyncOpenAI

MOST_CALLS = 4
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def calculate(node: Any) -> int:
    """Returns the value of a sum, a difference or a product of whole numbers."""
    if isinstance(node, ast.Expression):
        return calculate(node.body)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    return int(node.value)


def result_of(arguments: str) -> str:
    """Returns what the policy reads of a call."""
    try:
        return str(calculate(ast.parse(json.loads(arguments)["expression"], mode="eval")))
    except Exception as error:  # The policy may have written anything.
        return f"Error: {error}"


async def answer(prompt: Any, endpoint: Any) -> dict[str, Any]:
    """Asks until the policy answers without a call. The run's reward functions judge the conversation."""
    async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key) as client:
        messages, num_calls = list(prompt.messages), 0
        for _ in range(MOST_CALLS):
            said = await client.chat.completions.create(model=endpoint.model, messages=messages, tools=[TOOL])
            message = said.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                num_calls += 1
                result = result_of(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return {"metrics": {"tool_calls": num_calls}}


if __name__ == "__main__":
    given = SimpleNamespace(**json.loads(Path(os.environ["RLFRAME_PROMPT"]).read_text()))
    place = SimpleNamespace(
        url=os.environ["OPENAI_BASE_URL"], key=os.environ["OPENAI_API_KEY"], model=os.environ["RLFRAME_MODEL"]
    )
    Path(os.environ["RLFRAME_OUTCOME"]).write_text(json.dumps(asyncio.run(answer(given, place))))
