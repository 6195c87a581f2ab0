"""DeepSeek-V3.2."""

from rlframe.models.families._sparse import SparseDecoder


class DeepseekV32(SparseDecoder):
    """DeepSeek-V3 with sparse attention."""

    default_groups = (8, 4)


FAMILY = DeepseekV32()
