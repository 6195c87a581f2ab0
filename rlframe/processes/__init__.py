"""Processes for users' code, which may hang, crash, print or take all memory: each fails one task only.

`pool` is what callers use, `work` says what is run and within which limits, `process` is one worker as the pool sees
it, and `worker` the program that it runs."""
