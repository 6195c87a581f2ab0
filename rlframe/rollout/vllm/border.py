"""The calls that the engine makes in vLLM's worker processes."""

from typing import Protocol


class Extension(Protocol):
    """The methods that `worker.RankExtension` adds to vLLM's worker class. vLLM calls them by name, on all ranks at
    once.

    Arguments and results are pickled here, because vLLM's own serialisation supports little besides bytes.
    """

    def rlframe_start(self, adapter: bytes, with_mtp: bool) -> None:
        """Prepares the rank. Must be called once, after the model is loaded.

        Args:
            adapter: the pickled EngineAdapter, or None.
            with_mtp: whether weight sync brings the head for multi-token prediction.
        """
        ...

    def rlframe_call(self, calls: list[bytes]) -> bytes:
        """Executes this rank's call of its WeightDestination.

        Args:
            calls: by rank, the pickled RankCall.

        Returns:
            Pickled: the result; the error, or None; and whether a reload was interrupted, so that this
                rank's model cannot run any more.
        """
        ...

    def rlframe_take(self, wanted: list[tuple[str, int, int]]) -> bytes:
        """Takes requests out of the records of sampled tokens and of experts.

        Args:
            wanted: name of each request's record, the number of tokens that vLLM has returned, and the number of
                tokens, prompt included, whose experts are wanted.

        Returns:
            Pickled: for each request its tokens, their logprobs, and the experts [rows, all layers, k] or None, fewer
                if the records have not as many. Empty if another rank has the records.
        """
        ...

    def rlframe_line(self) -> bytes:
        """Returns, pickled, the address at which this rank answers beside its steps, empty if it does not, and whether
        it answers `rlframe_take` there. Every rank answers calls to receive weights there, with nothing if vLLM must
        make them: where it reloads, or sources send at the same time."""
        ...

    def rlframe_drafts(self) -> bytes:
        """Returns, pickled, the Drafts of this rank since it started."""
        ...

    def rlframe_refill(self) -> None:
        """Restores what a deep sleep has dropped and neither vLLM nor a sync restores."""
        ...

    def rlframe_free_bytes(self) -> int:
        """Returns the bytes of this rank's device that no process uses."""
        ...
