"""Processes for code of the user's, which may hang, crash, print or take all memory: each costs the task it happened
in.

`pool` is what callers use, `work` says what is run and within which limits, `process` is one worker as the pool sees
it, and `worker` the program that it runs."""
