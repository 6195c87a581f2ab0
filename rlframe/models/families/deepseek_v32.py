"""DeepSeek-V3.2. The layer for multi-token prediction is not loaded, as in transformers."""

from rlframe.models.families._sparse import SparseDecoder


class DeepseekV32(SparseDecoder):
    """DeepSeek-V3 with sparse attention."""


FAMILY = DeepseekV32()
