"""VersionGate: what an engine must pass before it samples, so that no token comes from weights that were not proved."""

import threading

from rlframe.utils.errors import WeightSyncFailed

WAIT_S = 1800.0
"""How long a call waits for a sync that is under way, unless it says otherwise."""


class VersionGate:
    """The version of the weights that one engine holds, and whether they are proved to be that. Thread-safe.

    It lives in the process that hands requests to the engine. Calls that come during a sync wait for its end; calls
    that come when nothing is proved are refused.

    Example:
        >>> gate = VersionGate()
        >>> gate.begin(3)
        >>> gate.commit(3)
        >>> gate.enter()
        3
    """

    def __init__(self) -> None:
        self.version: int | None = None
        """Version the weights are, or are about to be; None before the first sync."""
        self.verified = False
        """True when the driver has proved that the weights are those of `version`."""
        self._changed = threading.Condition()
        self._under_way = False
        self._reason = "nothing has been compared with the trainer yet"

    def begin(self, version: int) -> None:
        """A sync to `version` is under way: from here until `commit` or `fail`, `enter` waits."""
        with self._changed:
            self.version, self.verified, self._under_way = version, False, True

    def commit(self, version: int) -> None:
        """The driver has proved that the weights are those of `version`; waiting calls go on.

        Without a `begin`: what the engine loaded itself was found to be that version.
        """
        with self._changed:
            if self._under_way:
                assert version == self.version, f"commit of version {version} after begin of {self.version}"
            self.version, self.verified, self._under_way = version, True, False
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The weights are not known to be those of any version; waiting and later calls are refused with `reason`."""
        with self._changed:
            self.verified, self._under_way, self._reason = False, False, reason
            self._changed.notify_all()

    def enter(self, timeout_s: float = WAIT_S) -> int:
        """Returns the proved version; to call before sampling. Waits while a sync is under way.

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
                    f"engine holds weights of version {self.version} that are not verified: {self._reason}"
                )
            assert self.version is not None, "verified weights have a version"
            return self.version
