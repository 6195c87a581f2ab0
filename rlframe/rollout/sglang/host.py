"""The process between the engine's actor and SGLang's schedulers. It runs `sglang.Engine`.

SGLang kills the whole tree of processes above a scheduler that fails, up to the one that created the engine. Therefore
this process creates it, not the actor. `launch.Host` starts it as `python -m rlframe.rollout.sglang.host FD`, talks to
it through the socket FD, and finds the socket closed when the process is gone.
"""

import asyncio
import base64
import inspect
import pickle
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zmq
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import ProfileReq
from sglang.srt.server_args import ServerArgs

from rlframe.models import remote_code, tokenizer
from rlframe.rollout.base.routes import Routers
from rlframe.rollout.served.pending import spelled, top_logprobs
from rlframe.rollout.sglang.answers import serve
from rlframe.rollout.sglang.border import SCHEDULER_CALL, Answer, EngineHost, SchedulerRank
from rlframe.rollout.sglang.launch import Launch
from rlframe.rollout.sglang.sampler import FIRST_POSITION, MIN_TOKENS
from rlframe.rollout.sglang.worker import run_rank
from rlframe.types.batch import TopLogprobs
from rlframe.types.input import ModelInput
from rlframe.types.rollout import FinishReason, GenerationRequest
from rlframe.utils.calls import RankCall
from rlframe.utils.errors import ConfigError, WeightSyncFailed

REPLY_S = 600.0
"""Seconds that a rank may answer a call later than the first."""


class HostEngine(Engine):
    """SGLang's engine with rlframe's ranks. It has no detokenizer, because its output is token ids."""

    run_scheduler_process_func: Callable = staticmethod(run_rank)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        return [], []


class Host(EngineHost):
    """Answers the calls of one `launch.Host`, many at a time."""

    def __init__(self, launch: Launch):
        self._launch = launch
        self._tp: int = launch.arguments["tp_size"]
        self._engine: Any = HostEngine(**launch.arguments)
        self._tokenizer: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="rlframe-sglang-")
        # A socket file that only this user can open, because its messages are unpickled.
        self._reply = f"ipc://{Path(self._folder.name) / 'reply'}"
        self._socket = zmq.Context().socket(zmq.PULL)
        self._socket.bind(self._reply)
        self._socket.setsockopt(zmq.RCVTIMEO, int(REPLY_S * 1000))
        self._caller = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ranks")

    def serve(self, connection: Connection) -> None:
        """Answers calls until the other end closes."""
        self._engine.loop.run_until_complete(serve(self, connection))
        self._engine.shutdown()
        self._folder.cleanup()

    async def generate(self, name: str, request: GenerationRequest) -> Answer:
        """Samples until the request ends."""
        sampling = request.sampling
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_tokens - request.first_position,
            "stop_token_ids": self._launch.stop_tokens,
            "sampling_seed": request.seed,
            "custom_params": {MIN_TOKENS: sampling.min_tokens, FIRST_POSITION: request.first_position},
        }
        ids = request.input.token_ids.tolist()
        if not sampling.stop:
            routers = self._launch.routers
            output = await self._engine.async_generate(
                input_ids=ids,
                sampling_params=parameters,
                return_logprob=True,
                return_routed_experts=routers is not None,
                rid=name,
            )
            answer = _answer(output)
            if routers is None or answer.finish_reason == FinishReason.ABORT:
                return answer
            return replace(answer, routes=_routes(output, routers, num_tokens=len(ids) + len(answer.token_ids)))
        outputs = await self._engine.async_generate(
            input_ids=ids, sampling_params=parameters, return_logprob=True, rid=name, stream=True
        )
        answer, seen = None, 0
        async for output in outputs:
            answer = _answer(output)
            count = spelled(answer.token_ids, first=seen + 1, request=request, tokenizer=self._decoder())
            if count is not None:
                abort = RankCall.of(SchedulerRank.abort, [name], False)
                await self.ranks(str(abort), [pickle.dumps(abort)] * self._tp)
                return Answer(
                    token_ids=answer.token_ids[:count], logprobs=answer.logprobs[:count], finish_reason="stop"
                )
            seen = len(answer.token_ids)
        assert answer is not None, "a stream has an end"
        return answer

    async def score(self, name: str, sequence: ModelInput) -> list[float]:
        """Returns the nats of each token but the first, under log_softmax(logits)."""
        entries = (await self._prompt(name, sequence))["input_token_logprobs"][1:]
        # Not the tokens next to the logprobs: SGLang 0.5.23 returns 0 there for the last token of the vocabulary.
        assert len(entries) == len(sequence) - 1, "every token but the first has a logprob"
        return [logprob for logprob, _, _ in entries]

    async def top(self, name: str, sequence: ModelInput, k: int) -> TopLogprobs:
        """Returns the k most likely tokens in the place of each token but the first."""
        if len(sequence) == 1:
            return top_logprobs(torch.zeros(0, k), torch.zeros(0, k))
        rows = (await self._prompt(name, sequence, top_logprobs_num=k))["input_top_logprobs"][1:]
        assert len(rows) == len(sequence) - 1, "every token but the first has its place"
        ids = torch.tensor([[token for _, token, _ in row] for row in rows])
        return top_logprobs(ids, torch.tensor([[nats for nats, _, _ in row] for row in rows], dtype=torch.float64))

    async def _prompt(self, name: str, sequence: ModelInput, **more: Any) -> dict[str, Any]:
        """Returns SGLang's record of a prompt, with the logprobs of its tokens."""
        output = await self._engine.async_generate(
            input_ids=sequence.token_ids.tolist(),
            # SGLang requires that a token is sampled afterwards.
            sampling_params={"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=0,
            rid=name,
            **more,
        )
        return output["meta_info"]

    async def begin_profile(self, folder: str, activities: list[str], stacks: bool) -> None:
        """See EngineHost."""
        begin = self._engine.tokenizer_manager.start_profile
        options: dict[str, Any] = {"output_dir": folder, "activities": activities, "with_stack": stacks}
        # Arguments in SGLang 0.5.17, one request in 0.5.23.
        if "req" in inspect.signature(begin).parameters:
            await begin(ProfileReq(**options, record_shapes=False))
        else:
            await begin(**options, record_shapes=False)

    async def end_profile(self) -> None:
        """See EngineHost."""
        await self._engine.tokenizer_manager.stop_profile()

    async def ranks(self, name: str, calls: list[bytes]) -> list[tuple[Any, Any, bool]]:
        """See EngineHost."""
        return await asyncio.get_running_loop().run_in_executor(self._caller, self._blocking_call, name, calls)

    def _blocking_call(self, name: str, calls: list[bytes]) -> list[tuple[Any, Any, bool]]:
        packed = base64.b64encode(pickle.dumps(calls)).decode()
        self._engine.collective_rpc(SCHEDULER_CALL, calls=packed, reply=self._reply)
        answers: dict[int, tuple[Any, Any, bool]] = {}
        while len(answers) < self._tp:
            try:
                rank, *answer = pickle.loads(self._socket.recv())
            except zmq.Again:
                raise WeightSyncFailed(f"{name}: a rank of SGLang has not answered in {REPLY_S:g} s") from None
            answers[rank] = tuple(answer)
        return [answers[rank] for rank in range(self._tp)]

    def _decoder(self) -> Any:
        if self._tokenizer is None:
            folder = Path(self._launch.tokenizer)
            if self._launch.trusted:
                remote_code.trust(folder)
            self._tokenizer = tokenizer.load(folder)
        return self._tokenizer


def _answer(output: dict[str, Any]) -> Answer:
    """Returns SGLang's output for one request, so far."""
    notes = output["meta_info"]
    entries = notes.get("output_token_logprobs") or []
    # After an abort in the queue SGLang may return tokens without logprobs, or logprobs without tokens.
    count = min(len(entries), len(output["output_ids"]))
    assert [token for _, token, _ in entries[:count]] == output["output_ids"][:count], "logprobs are of the tokens"
    return Answer(
        token_ids=output["output_ids"][:count],
        logprobs=[logprob for logprob, _, _ in entries[:count]],
        finish_reason=(notes["finish_reason"] or {}).get("type", ""),
    )


def _routes(output: dict[str, Any], routers: Routers, *, num_tokens: int) -> np.ndarray:
    """Returns the routed experts of a request with `num_tokens` tokens of prompt and response; see `Completion.routes`.

    SGLang stores the experts of each token where it stores its keys and values, and returns those of the request's
    tokens when it ends. They include a cached prefix, and tokens recomputed after a pause.
    """
    told = output["meta_info"].get("routed_experts")
    # int32 in base64 (0.5.17, 0.5.23).
    found = None if told is None else np.frombuffer(base64.b64decode(told), dtype=np.int32)
    return routers.routes(found, num_tokens=num_tokens, engine="SGLang")


def known_arguments() -> set[str]:
    """Returns the names of SGLang's engine arguments."""
    # A dataclass in SGLang 0.5.17, a msgspec.Struct in 0.5.23.
    return set(getattr(ServerArgs, "__struct_fields__", None) or ServerArgs.__dict__["__dataclass_fields__"])


def main() -> None:
    """Runs the engine for the process at the other end of the socket."""
    connection = Connection(int(sys.argv[1]))
    launch: Launch = pickle.loads(connection.recv_bytes())
    if unknown := sorted(launch.arguments.keys() - known_arguments()):
        faults = [f"rollout.engine_options: this SGLang has no engine argument {name}" for name in unknown]
        connection.send_bytes(pickle.dumps((0, None, ConfigError(faults))))
        return
    host = Host(launch)
    connection.send_bytes(pickle.dumps((0, None, None)))
    host.serve(connection)


if __name__ == "__main__":
    main()
