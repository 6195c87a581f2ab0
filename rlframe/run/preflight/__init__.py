"""Preflight: memory and seconds of a run, computed from its configuration and config.json before anything starts.

`devices` says what a device has, `constants` what was measured; `weights`, `activations`, `trainer` and `engine` what a
process holds, `parts` what shares a device in each phase, `seconds` how long a step takes, `turns` how long it takes to
change roles. `plan` brings them together, `advice` and `layouts` try other settings, `describe` writes for people.
Imports no ray, no megatron and no engine.
"""
