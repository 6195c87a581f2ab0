"""Answers of a worker beside vLLM's calls."""

import asyncio
import pickle
import tempfile
import time
from pathlib import Path

import pytest
import torch

from rlframe.rollout.vllm.fetch import Wanted
from rlframe.rollout.vllm.line import CALL, TAKE, Line, answering, bound, by_line, called, wanted_in

CPU = torch.device("cpu")


def names(wanted: list[Wanted]) -> bytes:
    """Answers with the names that were asked for, many times."""
    return pickle.dumps([key * 100_000 for key, _, _ in wanted])


async def asked_of_vllm(wanted: list[Wanted]) -> list[bytes]:
    return [names(wanted), b"of the other rank"]


def test_a_worker_answers_one_call_after_the_other_and_leaves_no_files():
    address = answering({TAKE: lambda message: names(wanted_in(message))}, CPU)

    async def ask() -> list[list[bytes]]:
        line = await Line.to(address)
        take = by_line(line, asked_of_vllm)
        answers = [await take([("a", 1, 0)]), await take([("b", 2, 0), ("c", 3, 0)])]
        line.close()
        return answers

    first, second = asyncio.run(ask())
    assert first == [names([("a", 1, 0)])] and second == [names([("b", 2, 0), ("c", 3, 0)])]
    assert not Path(address).parent.exists()


def test_once_a_worker_is_gone_vllm_is_asked(tmp_path: Path):
    async def ask() -> list[list[bytes]]:
        def leave(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        async with await asyncio.start_unix_server(leave, tmp_path / "line"):
            take = by_line(await Line.to(str(tmp_path / "line")), asked_of_vllm)
            return [await take([("a", 1, 0)]), await take([("b", 1, 0)])]

    assert [answers[1] for answers in asyncio.run(ask())] == [b"of the other rank"] * 2


def test_calls_are_answered_by_all_workers_or_left_to_vllm():
    addresses = [answering({CALL: lambda call: call * 2}, CPU) for _ in range(2)]

    async def ask() -> list[list[bytes] | None]:
        lines = [await Line.to(each) for each in addresses]
        # A worker that answers nothing does not answer this call beside its steps.
        answers = [await called(lines, [b"one", b"two"]), await called(lines, [b"one", b""])]
        lines[0].close()
        return [*answers, await called(lines, [b"one", b"two"])]

    assert asyncio.run(ask()) == [[b"oneone", b"twotwo"], None, None]


def test_no_call_reads_the_answer_of_one_that_was_cancelled():
    address = answering({CALL: lambda call: time.sleep(0.1) or call}, CPU)

    async def ask() -> list[bytes] | None:
        line = await Line.to(address)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(line.ask(CALL, b"one"), timeout=0.01)
        return await called([line], [b"two"])

    assert asyncio.run(ask()) is None


@pytest.mark.parametrize("name", ["long" * 40, "nowhere"])
def test_a_temporary_folder_that_takes_no_socket_is_passed_over(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / name
    if name != "nowhere":
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    found = bound()
    assert found is not None and found[2].startswith("/tmp/rlframe-")
    found[1].close()
    found[0].cleanup()
    assert not folder.exists() or not any(folder.iterdir())
