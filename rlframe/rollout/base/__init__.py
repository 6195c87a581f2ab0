"""The common part of all engines: abstract class, settings, version gate, sampling and routed experts."""
