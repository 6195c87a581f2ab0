"""VersionGate: lets an engine sample only with weights whose version is proved."""

import threading

from rlframe.utils.errors import WeightSyncFailed

WAIT_S = 1800.0
"""Seconds that a call waits by default for a sync that is under way."""


class VersionGate:
    """The version of the weights of one engine, and whether that version is proved. Thread-safe.

    It lives in the process that passes requests to the engine. Calls during a sync wait for its end. Calls while
    nothing is proved are refused.

    Example:
        >>> gate = VersionGate()
        >>> gate.begin(3)
        >>> gate.commit(3)
        >>> gate.enter()
        3
    """

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the weights, or the version a running sync brings. None before the first sync."""
        self.verified = False
        """True when the driver has proved that the weights are those of `version`."""
        self._changed = threading.Condition()
        self._under_way = False
        self._reason = "nothing has been compared with the trainer yet"

    def begin(self, version: int) -> None:
        """Records that a sync to `version` is under way. `enter` waits until `commit` or `fail`."""
        with self._changed:
            self.version, self.verified, self._under_way = version, False, True

    def commit(self, version: int) -> None:
        """Records that the driver has proved the weights to be those of `version`, and lets waiting calls continue.

        Without a `begin` it means that the weights the engine loaded itself are that version.
        """
        with self._changed:
            if self._under_way:
                assert version == self.version, f"commit of version {version} after begin of {self.version}"
            self.version, self.verified, self._under_way = version, True, False
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Records that the weights are of no known version. Waiting and later calls are refused with `reason`."""
        with self._changed:
            self.verified, self._under_way, self._reason = False, False, reason
            self._changed.notify_all()

    def enter(self, timeout_s: float = WAIT_S) -> int:
        """Waits while a sync is under way, then returns the proved version. Must be called before sampling.

        Raises:
            WeightSyncFailed: the weights are not verified, or the sync took longer than `timeout_s`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._under_way, timeout_s):
                raise WeightSyncFailed(
                    f"a request waited {timeout_s:g} s for the weight sync to version {self.version} to end"
                )
            if not self.verified:
                raise WeightSyncFailed(
                    f"the engine holds weights of version {self.version} that are not verified: {self._reason}"
                )
            assert self.version is not None, "verified weights have a version"
            return self.version
