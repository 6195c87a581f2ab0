"""Training goes on while a checkpoint is written where every host has the memory for a copy."""

import pytest

from rlframe.loops.config import Asynchronous, CheckpointConfig
from rlframe.loops.saving.background import choose
from rlframe.megatron.messages.host_room import HostRoom
from rlframe.utils.process import memory


class Ranks:
    """Stands for the ranks of a model, which tell what they need and have."""

    def __init__(self, *rooms: tuple[str, float, float]):
        self._rooms = [
            (node, HostRoom(needed_bytes=int(1e9 * needed), free_bytes=int(1e9 * free))) for node, needed, free in rooms
        ]

    def host_room(self) -> list[tuple[str, HostRoom]]:
        """See ModelGroup."""
        return self._rooms


@pytest.mark.parametrize(
    ("models", "background"),
    [
        ([Ranks(("a", 4.0, 10.0))], True),
        # Two ranks of a host: 8 of 10 GB fit exactly, 9 do not.
        ([Ranks(("a", 4.0, 10.0), ("a", 4.0, 10.0))], True),
        ([Ranks(("a", 5.0, 10.0), ("a", 4.0, 10.0))], False),
        ([Ranks(("a", 5.0, 10.0), ("b", 4.0, 10.0))], True),
        # A critic beside the policy takes its part of the same host.
        ([Ranks(("a", 5.0, 10.0)), Ranks(("a", 5.0, 10.0))], False),
        # The host with least room decides, and of its reports the one that is least.
        ([Ranks(("a", 1.0, 10.0), ("b", 1.0, 1.0))], False),
        ([Ranks(("a", 4.0, 10.0), ("a", 4.0, 9.0))], False),
        ([Ranks(("a", 0.0, 0.0))], True),
    ],
)
def test_auto_needs_memory_on_every_host(models: list[Ranks], background: bool) -> None:
    assert choose(Asynchronous.AUTO, models).background is background
    assert choose(Asynchronous.TRUE, models).background
    assert not choose(Asynchronous.FALSE, models).background


def test_the_choice_says_what_it_was_made_by() -> None:
    enough, short = Ranks(("a", 4.0, 10.0)), Ranks(("a", 1.0, 10.0), ("b", 9.5, 10.0))
    assert choose(Asynchronous.AUTO, [enough]).said == (
        "checkpoints are written while training goes on: a copy takes 4.00 GB of a host with 10.0 GB free"
    )
    assert choose(Asynchronous.AUTO, [short]).said == (
        "training waits while a checkpoint is written: a copy takes 9.50 GB of a host with 10.0 GB free, and at most "
        "80% of that is used; checkpoint.asynchronous=true does it in any case"
    )


def test_a_checkpoint_at_the_end_only_is_not_copied() -> None:
    assert CheckpointConfig(every_steps=0).copies is Asynchronous.FALSE
    assert CheckpointConfig(every_steps=0, asynchronous=Asynchronous.TRUE).copies is Asynchronous.TRUE
    assert CheckpointConfig(every_steps=1).copies is Asynchronous.AUTO


def test_a_containers_limit_counts(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = memory.Path(str(tmp_path))
    monkeypatch.setattr(memory, "CGROUP", folder)
    free = memory.available_bytes()
    assert free > 0, "without a limit that of the machine"
    (folder / "memory.max").write_text("5000\n")
    (folder / "memory.current").write_text("3000\n")
    (folder / "memory.stat").write_text("anon 2500\ninactive_file 400\n")
    # 5000 may be used, 3000 are, of which 400 are files that the kernel can drop.
    assert memory.available_bytes() == 2400
    (folder / "memory.max").write_text("max\n")
    assert memory.available_bytes() > 2400
