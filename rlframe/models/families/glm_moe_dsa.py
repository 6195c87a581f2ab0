"""GLM-5."""

from collections.abc import Mapping
from typing import Any

from rlframe.models.families._sparse import SparseDecoder
from rlframe.models.families.base import faults_to_error


class GlmMoeDsa(SparseDecoder):
    """The sparse attention of DeepSeek-V3.2, with an indexer whose positions are interleaved."""

    rope_kinds = ("default",)
    interleaved_indexer = True

    def features(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        pattern = hf.get("indexer_types") or hf.get("index_topk_pattern") or ()
        if {*pattern} - {"full", "F"} or (not pattern and (hf.get("index_topk_freq") or 1) > 1):
            faults_to_error(hf, ["indexer_types must be full for every layer: layers that share the keys which an "
                                 "earlier layer chose are not supported"])  # fmt: skip
        return super().features(hf)


FAMILY = GlmMoeDsa()
