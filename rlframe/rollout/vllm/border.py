"""What the engine asks of vLLM's worker processes."""

from typing import Protocol


class Extension(Protocol):
    """Our part of vLLM's worker class, `worker.RankExtension`. vLLM calls it by the names of these methods, on all
    ranks at once.

    Arguments and results are pickled by us: vLLM's own serialisation carries bytes, and little else.
    """

    def rlframe_start(self) -> None:
        """Prepares the rank. To be called once, when the model is loaded."""
        ...

    def rlframe_call(self, calls: list[bytes]) -> bytes:
        """Carries out this rank's call of its WeightDestination.

        Args:
            calls: by rank, the pickled RankCall.

        Returns:
            Pickled: the result; the error instead, or None; and whether a reload was cut short, so that this rank's
            model can run no more.
        """
        ...

    def rlframe_free_bytes(self) -> int:
        """Returns the memory of this rank's device that no process has."""
        ...
