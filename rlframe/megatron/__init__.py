"""The training side, and the only importer of Megatron-Core: model, packed forward, loss, optimizer, worker groups.

`config.py` is light and may be imported anywhere; the other files pull in Megatron.
"""
