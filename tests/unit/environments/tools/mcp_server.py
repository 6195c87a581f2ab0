"""A small MCP server: `python mcp_server.py` over standard input and output, `python mcp_server.py PORT` over HTTP."""

import asyncio
import os
import sys
from typing import Any

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("numbers")
COUNT = [0]


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


@server.tool()
def count() -> int:
    """Counts the calls of this process."""
    COUNT[0] += 1
    return COUNT[0]


@server.tool()
def fail() -> str:
    """Raises."""
    raise ValueError("it cannot be done")


@server.tool()
async def wait(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def draw() -> Image:
    """Returns a picture."""
    return Image(data=b"1234", format="png")


@server.tool()
def table() -> dict[str, Any]:
    """Returns a record."""
    return {"a": [1, 2]}


@server.tool()
def die() -> str:
    """Ends the process."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
