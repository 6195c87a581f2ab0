"""DeepSeek-V3.2."""

from rlframe.models.families._sparse import SparseDecoder


class DeepseekV32(SparseDecoder):
    """DeepSeek-V3 with sparse attention."""


FAMILY = DeepseekV32()
