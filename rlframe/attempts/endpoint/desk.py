"""The desk of one attempt: takes the calls of its agent, has them answered by the engines, and keeps the sequences."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np

from rlframe.attempts.endpoint.asked import Asked, Refused
from rlframe.attempts.endpoint.conversation import Conversation, Place
from rlframe.attempts.endpoint.said import Said, SaidCall
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.attempts.rendering.reply import Reply
from rlframe.attempts.turns import Event, Hosted, WaitsFor
from rlframe.data.text.tool_calls import with_arguments_as_text
from rlframe.types.input import ModelInput
from rlframe.types.messages import Message
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, Rollout, SamplingParams
from rlframe.utils.errors import DataError, SettingError

logger = logging.getLogger(__name__)
Sampled = tuple[Place, list[Completion], int]
"""The place of a call, the parts of its response, and its number."""
TOLD: set[str] = set()
"""Parameters of which the user was told that they are ignored."""


class Desk:
    """Takes calls until it is closed. All of it runs in one event loop."""

    def __init__(
        self,
        hosted: Hosted,
        language: Renderer,
        decode: Callable[[list[int]], str],
        *,
        max_calls: int,
        stop_fault: str = "",
    ):
        """
        Args:
            decode: returns the text of tokens, special tokens left out.
            max_calls: greatest number of calls that are answered.
            stop_fault: the reason for which a call must give no stop strings. Empty if it may.
        """
        self._hosted, self._language, self._decode, self._max_calls = hosted, language, decode, max_calls
        self._stop_fault = stop_fault
        self._conversation = Conversation(language, hosted.rollout.prompt, hosted.rollout.sample_index)
        self._begun = self._told_calls = 0
        self._open: set[asyncio.Task[Sampled]] = set()
        self._idle_since: float = time.monotonic()
        self.is_over = False
        self.limit: Event | None = None
        """The first limit that a call was refused for."""
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Gets the error that ends the attempt."""

    @property
    def is_idle(self) -> bool:
        """Returns whether no call is under way."""
        return not self._open

    @property
    def idle_s(self) -> float:
        """Seconds for which no call has been under way."""
        return time.monotonic() - self._idle_since if self.is_idle else 0.0

    @property
    def was_answered(self) -> bool:
        """Returns whether there was a response."""
        return bool(self._conversation.num_answered)

    def begin(self) -> None:
        """Counts from now on for how long no call has been under way: the agent has begun."""
        self._idle_since = time.monotonic()

    async def answer(self, asked: Asked) -> Said:
        """Returns what the policy says. The engine forgets the call if the wait is cancelled.

        Raises:
            Refused: the call cannot be answered.
        """
        task = asyncio.get_running_loop().create_task(self._answer(asked))
        self._open.add(task)
        self._hosted.progress.waits_for = WaitsFor.ENGINE
        try:
            place, completions, number = await task
            if self.is_over:
                raise over()
            # Nothing waits from here on: the call is answered as a whole, or not at all.
            return self._said(asked, place, completions, number)
        except asyncio.CancelledError:
            if self.is_over:
                raise over() from None
            self._hosted.count(Event.CALLS_LOST)
            raise
        except Refused:
            if not self.is_over:
                self._hosted.count(Event.CALLS_REFUSED)
            raise
        except BaseException as error:
            if not self.broken.done():
                self.broken.set_exception(error)
            raise Refused("the run has failed", status=500) from None
        finally:
            self._open.discard(task)
            if not self._open:
                self._idle_since = time.monotonic()
                if not self.is_over:
                    self._hosted.progress.waits_for = WaitsFor.ENVIRONMENT

    def refuse(self) -> None:
        """Counts a request that was refused before it got here."""
        self._hosted.count(Event.CALLS_REFUSED)

    def close(self) -> None:
        """Ends the calls under way, and fills the attempt's sequences, as far as they came."""
        self.is_over = True
        for task in self._open:
            task.cancel()
        if self.broken.done():
            self.broken.exception()
        sequences = self._conversation.ordered()
        for index, sequence in enumerate(sequences):
            self._fill(index, sequence)

    def _fill(self, index: int, sequence: Rollout) -> None:
        rollout, task = self._hosted.rollout, self._hosted.task
        first, sampled, earlier = 0, 0, ()
        if index:
            first, sampled, earlier = rollout.num_turns, rollout.num_sampled_by_attempt, rollout.records
            self._hosted.count(Event.FORKED)
            task.fork(rollout, sequence.input)
        for each in fields(Rollout):
            setattr(rollout, each.name, getattr(sequence, each.name))
        rollout.first_turn, rollout.first_sampled, rollout.records = first, sampled, (*earlier, *sequence.records)
        start, end = rollout.turns[-1]
        rollout.sequence, rollout.text = index, self._decode(rollout.token_ids[start:end].tolist())

    async def _answer(self, asked: Asked) -> Sampled:
        if self.is_over:
            raise over()
        if asked.stop and self._stop_fault:
            why = f"stop is not supported in this run: {self._stop_fault}"
            raise Refused(why, code="unsupported_parameter", parameter="stop")
        if self._begun >= self._max_calls:
            why = f"this attempt has made environment.max_turns={self._max_calls} calls"
            raise self._limited(Event.TOO_MANY_TURNS, why, "too_many_calls")
        try:
            place = self._conversation.place(asked)
        except (DataError, SettingError) as error:
            raise Refused(f"the chat template cannot write this conversation: {error}", parameter="messages") from None
        sampling, most = self._sampling(asked), self._hosted.most
        if len(place.token_ids) + sampling.max_tokens > most:
            why = (
                f"a sequence has at most {most} tokens, but these messages have {len(place.token_ids)}, and the "
                f"response may have {sampling.max_tokens}"
            )
            raise self._limited(Event.NO_ROOM, why, "context_length_exceeded")
        self._tell(asked)
        number, self._begun = self._begun, self._begun + 1
        return place, await self._sampled(place, sampling, seed=self._hosted.seed(number)), number

    async def _sampled(self, place: Place, sampling: SamplingParams, *, seed: int) -> list[Completion]:
        """Returns the parts of a response: one, and one more for each time that it was interrupted."""
        input, begun, parts = ModelInput(np.array(place.token_ids)), 0, []
        while True:
            request = GenerationRequest(input=input, sampling=sampling, first_position=begun, seed=seed)
            completion = await self._hosted.sample(request)
            parts.append(completion)
            if completion.finish_reason is not FinishReason.ABORT:
                return parts
            input, begun = input.then(completion.token_ids), begun + len(completion.token_ids)

    def _said(self, asked: Asked, place: Place, completions: Sequence[Completion], number: int) -> Said:
        """Keeps a response, and returns it as the agent is told."""
        sampled = [token for completion in completions for token in completion.token_ids.tolist()]
        reply = self._language.parse(sampled, asked.tools, prompt=place.token_ids)
        finish_reason = completions[-1].finish_reason
        if finish_reason is FinishReason.LENGTH:
            self._hosted.count(Event.CUT_OFF)
        message = self._told(reply, asked.stop)
        self._conversation.add(place, completions, reply, told=message)
        self._hosted.progress.turn += 1
        calls = [
            SaidCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
            for call in with_arguments_as_text(message).get("tool_calls", ())
        ]
        return Said(
            id=f"{self._hosted.rollout.sample_index}-{number}",
            model=asked.model or "policy",
            created=int(time.time()),
            content=message["content"],
            reasoning=message.get("reasoning_content", ""),
            calls=tuple(calls),
            is_cut_off=finish_reason is FinishReason.LENGTH,
            prompt_tokens=len(place.token_ids),
            sampled_tokens=len(sampled),
        )

    def _told(self, reply: Reply, stop: Sequence[str]) -> Message:
        """Returns a response as the agent is told: without its stop strings, and with ids that no other call has."""
        texts = {name: reply.message[name] for name in ("content", "reasoning_content") if name in reply.message}
        calls = []
        for call in reply.message.get("tool_calls", ()):
            self._told_calls += 1
            # Nine letters and digits: Mistral's templates take no other.
            calls.append({**call, "id": f"call{self._told_calls:05d}"})
        told = {**reply.message, **{name: _before(text, stop) for name, text in texts.items()}}
        return told | ({"tool_calls": calls} if calls else {})

    def _sampling(self, asked: Asked) -> SamplingParams:
        """Returns how the run samples, with a smaller limit and further stop strings if the agent wants that."""
        given = self._hosted.task.sampling
        most = min(given.max_tokens, asked.max_tokens or given.max_tokens)
        stop = tuple(dict.fromkeys((*given.stop, *asked.stop)))
        return replace(given, max_tokens=most, min_tokens=min(given.min_tokens, most), stop=stop)

    def _limited(self, event: Event, why: str, code: str) -> Refused:
        """Returns the refusal of a call that is beyond a limit, which is counted once."""
        if self.limit is None:
            self.limit = event
            self._hosted.count(event)
        return Refused(why, code=code, parameter="messages")

    def _tell(self, asked: Asked) -> None:
        """Counts a call whose parameters are not heeded. The first one of each parameter is told to the user."""
        if asked.ignored:
            self._hosted.count(Event.PARAMETERS_IGNORED)
        for name in asked.ignored:
            if name not in TOLD:
                TOLD.add(name)
                logger.warning("an agent sets %s, which is ignored: the run's settings decide how is sampled", name)


def _before(text: str, stop: Sequence[str]) -> str:
    """Returns a text up to the first of the stop strings in it."""
    return text[: min((text.find(each) for each in stop if each in text), default=len(text))]


def over() -> Refused:
    """Returns the refusal of a call after the end of its attempt."""
    return Refused("the attempt is over, and its endpoint with it", status=410, code="attempt_is_over")
