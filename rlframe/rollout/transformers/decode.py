"""The decode loop of the transformers engine: many requests, one forward pass per token."""

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from rlframe.cluster.watch.marks import mark
from rlframe.rollout.base.routes import RouteRecorder
from rlframe.rollout.base.sampling import sample, uniforms
from rlframe.rollout.base.stop import completes, reach
from rlframe.rollout.transformers.kv_cache import KVCache
from rlframe.types.rollout import Completion, FinishReason, GenerationRequest, SamplingParams, versions_by_token

PREFILL_TOKENS = 16384
"""Greatest number of padded prompt tokens of one prefill. Bounds its activations, and keeps prompts of similar length
together."""
TURNOVER = 0.25
"""Fraction of finished rows at which they are replaced by waiting requests."""


@dataclass(kw_only=True, slots=True)
class Rows:
    """The B sequences being decoded, in the first B slots."""

    request: Int[Tensor, " B"]
    """[B] index of each row's request."""
    last: Int[Tensor, " B"]
    """[B] newest token, not yet read by the model."""
    position: Int[Tensor, " B"]
    """[B] position of `last` in the sequence, from 0."""
    generated: Int[Tensor, " B"]
    """[B] number of tokens of the response so far, those of an earlier request included."""
    seed: Int[Tensor, " B"]
    min_tokens: Int[Tensor, " B"]
    max_tokens: Int[Tensor, " B"]
    stopped: Bool[Tensor, " B"]
    """[B] True after a stop token or stop string."""

    def __len__(self) -> int:
        return len(self.request)

    @property
    def finished(self) -> Bool[Tensor, " B"]:
        """[B] True if nothing more is to be sampled."""
        return self.stopped | (self.generated >= self.max_tokens)

    def select(self, index: Int[Tensor, " N"]) -> "Rows":
        """Returns the rows `index`, in that order."""
        return Rows(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def joined(self, other: "Rows") -> "Rows":
        """Returns these rows followed by the other ones."""
        return Rows(
            **{field.name: torch.cat([getattr(rows, field.name) for rows in (self, other)]) for field in fields(self)}
        )


class Control:
    """Lets other threads pause or abort a decode loop, which checks it between two tokens."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._paused = False
        self._computing = False
        self._aborts = 0
        self.aborted: frozenset[str] = frozenset()
        """Names of requests that must leave the loops of this computation."""
        self.wanted = False
        """True if the loop must call `proceed`. Checking it needs no lock."""

    def pause(self) -> None:
        """Pauses the loop until `resume`. Returns when nothing is being computed."""
        with self._changed:
            self._paused = self.wanted = True
            self._changed.wait_for(lambda: not self._computing)

    def resume(self) -> None:
        """Lets the loop continue."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def abort(self, names: Collection[str] | None = None) -> None:
        """Ends the running loop at its next token, also if it is paused. Later loops are not affected.

        Args:
            names: requests that leave the loop, when it continues if it is paused. None ends the loop.
        """
        with self._changed:
            if names is None:
                self._aborts += 1
            else:
                self.aborted = self.aborted.union(names) - {""}
            self.wanted = True
            self._changed.notify_all()

    def start(self) -> int:
        """Waits while paused, then starts a loop. Returns the number that `proceed` expects."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._computing, self.wanted, self.aborted = True, False, frozenset()
            return self._aborts

    def proceed(self, started: int) -> bool | None:
        """Waits while the loop is paused. Returns whether it was, or None if the loop that got `started` must end."""
        with self._changed:
            paused, self._computing = self._paused, False
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._paused or self._aborts != started)
            self._computing = self._aborts == started
            self.wanted = not self._computing
            return paused if self._computing else None

    def end(self) -> None:
        """Marks that the loop has finished computing."""
        with self._changed:
            self._computing = False
            self._changed.notify_all()


class DecodeLoop:
    """Continues requests that share temperature, top_p, top_k and stop strings."""

    def __init__(
        self,
        model: Any,
        *,
        requests: list[GenerationRequest],
        stop_tokens: list[int],
        tokenizer: Any,
        slots: KVCache,
        recorder: RouteRecorder | None,
        version: int,
        recompute: bool,
        control: Control,
        proceed: Callable[[int], int | None],
    ):
        """Prepares; `run` does the work.

        Args:
            slots: key-value cache; its number of slots is the number of sequences that decode at once.
            recorder: recorder of the model, if routed experts are wanted.
            version: version of the weights at the start.
            recompute: whether new weights recompute the cache of the requests they find.
            control: checked after every token.
            proceed: called with the version of the weights if `control.wanted` is set; returns the one to continue
                with, or None to end.
        """
        self.model = model
        self.device = model.device
        self.requests = requests
        self.inputs = [tuple(request.input.token_ids.tolist()) for request in requests]
        self.sampling: SamplingParams = requests[0].sampling
        self.tokenizer = tokenizer
        self.slots = slots
        self.recompute, self.control, self.proceed = recompute, control, proceed
        self.stop_tokens = torch.tensor(stop_tokens, dtype=torch.int64, device=self.device)
        # One spare column: a finished row that waits to be removed writes there.
        columns = max(request.sampling.max_tokens for request in requests) + 1
        self.tokens = torch.zeros(len(requests), columns, dtype=torch.int64, device=self.device)
        for index, request in enumerate(requests):
            if request.first_position:
                self.tokens[index, : request.first_position] = self._integers(request.begun)
        self.logprobs = torch.zeros(len(requests), columns, device=self.device)
        self.counts = self._integers([request.first_position for request in requests])
        self.stopped = torch.zeros(len(requests), dtype=torch.bool, device=self.device)
        self.recorder, self.routes = recorder, torch.zeros(0)
        """[requests, P + L, layers, k] routed experts, if there is a recorder. A finished row that waits writes behind
        its own tokens."""
        if recorder is not None:
            longest = max(request.prompt_tokens for request in requests)
            shape = (len(recorder.routers.layers), recorder.routers.experts_per_token)
            self.routes = torch.zeros(
                len(requests), longest + columns, *shape, dtype=recorder.dtype, device=self.device
            )
        self.versions: list[tuple[int, list[int]]] = [(version, self.counts.tolist())]
        """Pairs of a version and, for each request, the number of tokens that came before."""

    @torch.inference_mode()
    def run(self) -> list[Completion]:
        """Returns the completion of each request, in their order."""
        # Longest first, equal prompts next to each other: rows that decode together have similar lengths.
        by_input = sorted(range(len(self.requests)), key=lambda i: (-len(self.inputs[i]), self.inputs[i]))
        waiting = self.unaborted(by_input)
        rows = self.admit(waiting, None)
        while len(rows):
            self.decode(rows)
            rows = self.without(rows, rows.finished)
            if self.control.wanted:
                version = self.proceed(self.version)
                waiting, rows = self.unaborted(waiting), self.without(rows, self.aborted(rows))
                if not self.go_on(rows, version):
                    break
            rows = self.admit(waiting, rows)
        return self.completions()

    @property
    def version(self) -> int:
        """Version of the weights that sampled last."""
        return self.versions[-1][0]

    def unaborted(self, waiting: Iterable[int]) -> deque[int]:
        """Returns the waiting requests without those that are aborted."""
        return deque(index for index in waiting if self.requests[index].name not in self.control.aborted)

    def aborted(self, rows: Rows) -> Bool[Tensor, " B"]:
        """Returns [B] True for the rows that are aborted."""
        names = [self.requests[index].name for index in rows.request.tolist()]
        return torch.tensor([name in self.control.aborted for name in names], dtype=torch.bool, device=self.device)

    def go_on(self, rows: Rows, version: int | None) -> bool:
        """Prepares `rows` for the weights of `version`. Returns False if the loop must end with the tokens the requests
        have.

        The cache of `rows` is recomputed if the weights changed, unless it is to be kept.
        """
        counts = self.counts.clone()
        counts[rows.request] = rows.generated
        if version is None:
            self.counts = counts
            return False
        if version != self.version:
            self.versions.append((version, counts.tolist()))
            if not self.recompute:
                return True
            pairs = zip(rows.request.tolist(), rows.generated.tolist(), strict=True)
            prompts = [self.inputs[index][: request.prompt_tokens] for index, request in enumerate(self.requests)]
            texts = [(*prompts[i], *self.tokens[i, :count].tolist()) for i, count in pairs]
            self.prefill([text[:-1] for text in texts], first_slot=0)
        return True

    def admit(self, waiting: deque[int], rows: Rows | None) -> Rows:
        """Returns `rows` joined by waiting requests in the free slots, with their prompts in the cache."""
        first = 0 if rows is None else len(rows)
        indices = [waiting.popleft() for _ in range(min(len(waiting), self.slots.num_slots - first))]
        if indices:
            # The last token is left to the decode loop, whose first step then samples for every row alike.
            texts = [self.inputs[index][:-1] for index in indices]
            self.prefill(texts, first_slot=first, requests=indices)
        new = self.rows_of(indices)
        return new if rows is None else rows.joined(new)

    def rows_of(self, indices: list[int]) -> Rows:
        """Returns rows for requests whose prompts, without the last token, are in the cache."""
        requests = [self.requests[index] for index in indices]
        return Rows(
            request=self._integers(indices),
            last=self._integers([request.input.token_ids[-1] for request in requests]),
            position=self._integers([len(request.input) - 1 for request in requests]),
            generated=self._integers([request.first_position for request in requests]),
            seed=self._integers([request.seed for request in requests]),
            min_tokens=self._integers([request.sampling.min_tokens for request in requests]),
            max_tokens=self._integers([request.sampling.max_tokens for request in requests]),
            stopped=torch.zeros(len(indices), dtype=torch.bool, device=self.device),
        )

    def prefill(self, texts: list[tuple[int, ...]], *, first_slot: int, requests: list[int] | None = None) -> None:
        """Runs the `texts`, each distinct one once, into slots from `first_slot` on.

        Args:
            requests: the requests of `texts`, whose routed experts are recorded; None keeps the recorded ones.
        """
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, text in enumerate(texts, start=first_slot):
            slots_of.setdefault(text, []).append(slot)
        if self.slots.states is not None and () in slots_of:
            self.slots.states.clear(self._integers(slots_of[()]))
        prompts = sorted((text for text in slots_of if text), key=len, reverse=True)
        while prompts:
            count = max(1, PREFILL_TOKENS // len(prompts[0]))
            if self.slots.states is not None:
                # A state would take up the padding too, so that only prompts of one length run together.
                count = min(count, sum(len(prompt) == len(prompts[0]) for prompt in prompts))
            chunk, prompts = prompts[:count], prompts[count:]
            padded = torch.zeros(len(chunk), len(chunk[0]), dtype=torch.int64)
            for row, prompt in enumerate(chunk):
                padded[row, : len(prompt)] = torch.tensor(prompt)
            pairs = [(slot, row) for row, prompt in enumerate(chunk) for slot in slots_of[prompt]]
            slots, rows = self._integers(pairs).unbind(1)
            self.slots.prefill(slots=slots, prompts=rows)
            self.forward(padded.to(self.device), torch.arange(padded.shape[1], device=self.device)[None])
            if self.recorder is not None and requests is not None:
                owners = self._integers([requests[slot - first_slot] for slot, _ in pairs])
                self.routes[owners, : padded.shape[1]] = self.recorder.last().unflatten(0, padded.shape)[rows]

    def forward(self, tokens: Int[Tensor, "B Q"], positions: Int[Tensor, "B Q"]) -> Tensor:
        """Returns [B, V] logits after the last of the tokens."""
        output = self.model(
            tokens,
            position_ids=positions,
            use_cache=False,
            past_key_values=self.slots.states,
            logits_to_keep=1,
            slots=self.slots,
            return_dict=True,
        )
        return output.logits[:, -1]

    def decode(self, rows: Rows) -> None:
        """Samples tokens for `rows`, in place, until enough of them are finished or `control` must be obeyed."""
        used = int(rows.position.max()) + 1
        forbidden_steps = int((rows.min_tokens - rows.generated).max())
        enough = len(rows) * TURNOVER
        while True:
            mark(f"decoding {len(rows)} requests at position {used}")
            self.slots.decode(rows.position, used=used, dtype=self.model.dtype)
            logits = self.forward(rows.last[:, None], rows.position[:, None])
            if self.recorder is not None:
                self.routes[rows.request, rows.position] = self.recorder.last()
            sampled = sample(
                logits,
                sampling=self.sampling,
                uniform=uniforms(rows.seed, rows.generated),
                forbidden=self.forbidden(rows, logits.shape[-1]) if forbidden_steps > 0 else None,
            )
            self.tokens[rows.request, rows.generated] = sampled.tokens
            self.logprobs[rows.request, rows.generated] = sampled.logprobs
            running = ~rows.finished
            rows.last = sampled.tokens
            rows.position += running
            rows.generated += running
            rows.stopped |= running & torch.isin(sampled.tokens, self.stop_tokens)
            if self.sampling.stop:
                rows.stopped |= running & self.completes_stop_string(rows)
            used += 1
            forbidden_steps -= 1
            if int(rows.finished.sum()) >= enough or self.control.wanted:
                return

    def forbidden(self, rows: Rows, vocabulary: int) -> Bool[Tensor, "B V"]:
        """Returns [B, V] True for the stop tokens of rows that have not reached their min_tokens."""
        is_stop = torch.zeros(vocabulary, dtype=torch.bool, device=self.device).index_fill_(0, self.stop_tokens, True)
        return is_stop & (rows.generated < rows.min_tokens)[:, None]

    def completes_stop_string(self, rows: Rows) -> Bool[Tensor, " B"]:
        """Returns [B] True where the newest token completes a stop string and min_tokens is reached."""
        stop, most = self.sampling.stop, reach(self.sampling.stop)
        found = [
            completes(self.tokens[request, max(0, count - most) : count].tolist(), stop, self.tokenizer)
            for request, count in zip(rows.request.tolist(), rows.generated.tolist(), strict=True)
        ]
        return torch.tensor(found, device=self.device) & (rows.generated >= rows.min_tokens)

    def without(self, rows: Rows, finished: Bool[Tensor, " B"]) -> Rows:
        """Records the results of the rows that have `finished` and returns the other ones, moved to the first slots."""
        done = rows.select(finished.nonzero()[:, 0])
        self.counts[done.request] = done.generated
        self.stopped[done.request] = done.stopped
        remaining = len(rows) - len(done)
        live = (~finished).nonzero()[:, 0]
        holes = finished[:remaining].nonzero()[:, 0]
        movers = live[len(live) - len(holes) :]
        if len(holes):
            self.slots.move(sources=movers, targets=holes, used=int(rows.position[movers].max()) + 1)
        order = torch.arange(remaining, device=self.device)
        order[holes] = movers
        return rows.select(order)

    def completions(self) -> list[Completion]:
        """Returns the completion of each request."""
        counts, firsts = self.counts.tolist(), [request.first_position for request in self.requests]
        tokens, logprobs = self.tokens.int().cpu().numpy(), self.logprobs.float().cpu().numpy()
        return [
            Completion(
                token_ids=tokens[index, first:count].copy(),
                logprobs=logprobs[index, first:count].copy(),
                versions=versions_by_token(
                    [(version, before[index] - first) for version, before in self.versions], count - first
                ),
                finish_reason=reason(request, count, stopped=stopped),
                routes=self.routes_of(index, count),
            )
            for index, (request, first, count, stopped) in enumerate(
                zip(self.requests, firsts, counts, self.stopped.tolist(), strict=True)
            )
        ]

    def routes_of(self, index: int, count: int) -> np.ndarray | None:
        """Returns the routed experts of request `index` with its `count` tokens; see Completion. None for one that was
        aborted before its first token: its input may not have been computed."""
        request = self.requests[index]
        if self.recorder is None or count == request.first_position:
            return None
        return self.routes[index, : request.prompt_tokens + count - 1].cpu().numpy().copy()

    def _integers(self, values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


def reason(request: GenerationRequest, count: int, *, stopped: bool) -> FinishReason:
    """Returns why a request with `count` tokens has ended."""
    if stopped:
        return FinishReason.STOP
    return FinishReason.LENGTH if count >= request.sampling.max_tokens else FinishReason.ABORT
