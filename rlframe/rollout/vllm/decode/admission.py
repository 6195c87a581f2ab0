"""The steps in which vLLM's scheduler admits requests that wait.

vLLM (0.26 to 0.32) admits a request as soon as it fits. Two things are wrong with that:

  * A step with prompts has no CUDA graph of the whole model: its kernels are launched one by one. On H200s it took 12
    to 16 ms more than the 2.8 of a step that only decodes with a 1.7 B, and 10 more than 8 with an 8 B. While more
    requests wait than fit, nearly every response that ends brings such a step: with 64 sequences of 226 tokens every
    third step is one. So requests wait until what their empty places have cost is as much as a step with prompts does
    (`Admission._saves`). That can go when steps with prompts take no longer than others beside their own computation.
  * A request that was preempted begins anew with the tokens that vLLM knows (see `Admission._awaits_tokens`).
"""

from typing import Any

MOST_HELD = 128
"""Steps after which vLLM decides again whether another request fits: windows of attention give memory back, too."""
PLAIN = ("WAITING", "PREEMPTED")
"""Names of the states of requests that wait for nothing but their admission."""


class Admission:
    """Admits requests into the steps of a scheduler."""

    def __init__(self, scheduler: Any, *, step_cost: float):
        """
        Args:
            scheduler: vLLM's. This object takes the place of its methods when `install` is called.
            step_cost: what a step with prompts costs beside their own computation, in steps that only decode. 0:
                requests are admitted as soon as they fit.
        """
        self._scheduler, self._step_cost = scheduler, step_cost
        self._decide, self._preempt = scheduler.schedule, scheduler._preempt_request
        self._preempted: list[Any] = []
        self._most: int | None = None
        """Number of requests that ran when no other fitted any more. None if others may fit."""
        self._lost = 0
        """Tokens that requests would have sampled since, had they been admitted into empty places at once."""
        self._held = 0
        """Steps since then."""

    def install(self) -> None:
        """Takes the place of the scheduler's methods."""
        self._scheduler.schedule, self._scheduler._preempt_request = self.schedule, self._preempt_request

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """See Scheduler."""
        return self.decide(*arguments, held=self.holds(), **options)

    def holds(self) -> bool:
        """Returns whether the next step admits no request. To be called once for each step."""
        return self._awaits_tokens() or self._saves()

    def decide(self, *arguments: Any, held: bool, **options: Any) -> Any:
        """Returns vLLM's decision on the next step.

        Args:
            held: what `holds` has returned.
            arguments, options: those of `Scheduler.schedule`.
        """
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self._scheduler
        if scheduler.pause_state is not PauseState.UNPAUSED:
            return self._decide(*arguments, **options)
        if not held:
            output = self._decide(*arguments, **options)
            self._note(output)
            return output
        # Not by set_pause_state, which writes a line to the log in later releases.
        scheduler._pause_state = PauseState.PAUSED_NEW
        try:
            return self._decide(*arguments, **options)
        finally:
            scheduler._pause_state = PauseState.UNPAUSED

    def _note(self, output: Any) -> None:
        """Takes note of a step that admits all requests that fit."""
        scheduler = self._scheduler
        admits = output.scheduled_new_reqs or output.scheduled_cached_reqs.resumed_req_ids
        # Prompts use up a step's tokens. Others may then fit into the next one.
        decodes = output.total_num_scheduled_tokens == len(output.num_scheduled_tokens)
        num_running = len(scheduler.running)
        is_full = num_running >= scheduler.max_num_running_reqs or (decodes and not admits)
        self._most = num_running if scheduler.waiting and is_full else None
        self._lost = self._held = 0

    def _saves(self) -> bool:
        """Returns whether requests wait on until several can be admitted in one step.

        With a cost of C steps, N sequences and R of them ending in a step, an admission of K requests comes every K / R
        steps, costs C N tokens, and its places have been empty for K^2 / 2R tokens. The sum for one request is least
        where both are equal (the lot size of Harris, 1913, doi.org/10.1287/opre.38.6.947), whatever R is. Where no more
        requests wait than fit they are admitted at once: the last of a batch decide when it ends.
        """
        scheduler = self._scheduler
        waiting, num_running = scheduler.waiting, len(scheduler.running)
        # Requests that were skipped wait for something else than a place, such as a grammar. Since 0.27 or later they
        # are among the others.
        skipped = getattr(scheduler, "skipped_waiting", None)
        if self._most is None or not waiting or skipped or waiting.peek_request().status.name not in PLAIN:
            self._most = None
            return False
        empty = self._most - num_running
        self._lost += max(0, empty)
        self._held += 1
        saves = len(waiting) > empty and self._lost < self._step_cost * num_running
        return saves and self._held <= MOST_HELD

    def _preempt_request(self, request: Any, *arguments: Any, **options: Any) -> None:
        self._preempt(request, *arguments, **options)
        self._preempted.append(request)

    def _awaits_tokens(self) -> bool:
        """Returns whether a request that was preempted waits for tokens of steps under way.

        vLLM (0.26) begins such a request anew with the tokens that it knows. With two steps under way it knows all of
        them by then. With three it may sample the last one again, and then takes both. Later releases keep account of
        such steps (`num_stale_output_tokens` in 0.32), so that no preempted request waits here.
        """
        # Those that have ended or been admitted since have left the queue.
        self._preempted = [
            each for each in self._preempted if each.status.name == "PREEMPTED" and each.num_output_placeholders
        ]
        return bool(self._preempted)
