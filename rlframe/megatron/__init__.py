"""The training side, and the only importer of Megatron-Core. Each subpackage imports only those below it.

driver      groups of ranks, in the controller's process
worker      the actor and the trainer of a rank
checkpoint  training state on disk
lora        adapters
proof       comparisons of replicas
model       a rank's model and its forward pass
vocab cpu   logits split by vocabulary; Megatron-Core on a CPU
packed      rows of a packed pass
messages    between driver and ranks
config      settings, without a Megatron import
compat      what differs between releases of Megatron-Core
"""
