"""The type of tokenizers, for annotations: transformers takes a second to import, which a check of a configuration does
without."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
else:
    PreTrainedTokenizerBase = Any

__all__ = ["PreTrainedTokenizerBase"]
