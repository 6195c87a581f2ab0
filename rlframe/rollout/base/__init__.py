"""What every engine shares: its abstract class, settings, version gate, sampling and routed experts."""
