"""What only SGLang has: checksums of its own, and a layout that is known without it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.rollout.sglang import layout as sglang_layout
from rlframe.rollout.sglang.engine import SglangEngine
from rlframe.types.rollout import SamplingParams
from rlframe.utils.calls import RankCall
from rlframe.weight_sync.border import DestinationRank
from tests.contracts.engines.kinds import param
from tests.contracts.engines.trainer import CLOSE, Case, nats, perturbed, synced, transformers_model
from tests.rollout_models import make_requests

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("running", [param("sglang")], indirect=True)
def test_a_reload_and_direct_copies_leave_the_same_weights_by_the_engines_own_checksums(case: Case):
    assert case.sync.choice.name == "shm"
    new = perturbed(case.weights, seed=3)
    started = case.engine.checksums()
    case.trainer.train(new)
    case.sync.publish(version=1)
    copied = case.engine.checksums()
    trainer, _, sync = synced(case.engine, case.weights, transport="reload")
    assert sync.choice.name == "reload over shm"
    assert case.engine.checksums() == started != copied
    trainer.train(new)
    sync.publish(version=1)
    assert case.engine.checksums() == copied
    request = make_requests(1, sampling=SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12))
    (completion,) = case.engine.generate(request)
    expected = nats(transformers_model(case.folder, new), request[0], completion.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **CLOSE)


@pytest.mark.parametrize("running", [param("sglang")], indirect=True)
def test_the_layout_recorded_without_an_engine_is_the_engines(
    engine: SglangEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    from sglang.srt.configs import model_config, update_config
    from sglang.srt.configs.load_config import LoadConfig

    plain = model_config.ModelConfig.from_server_args

    def padded(arguments: Any) -> Any:
        """Widths as SGLang has them on the CPU alone, whole blocks of 32: the experts' 48 become 64."""
        return update_config.adjust_config_with_unaligned_cpu_tp(plain(arguments), LoadConfig(), 1)

    monkeypatch.setattr(model_config.ModelConfig, "from_server_args", padded)
    (mine,) = sglang_layout.engine_layouts(folder, dtype=torch.float32)
    (info,) = engine.on_ranks([RankCall.of(DestinationRank.describe)])
    assert info.layout == mine
