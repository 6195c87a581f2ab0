"""Damages every file of a checkpoint in every way, and asks what the run would do.

The checkpoints are those of a real run of three steps, and of the real writers with a critic beside the policy. Each
trial damages a fresh copy of the run's folder and asks as a starting run does, before any process starts. REFUSED means
that the sentence names the damaged file, and the step to go on from; USED that the run rightly goes on from the newest.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.cluster.roles import CRITIC
from rlframe.loops.config import CheckpointConfig
from rlframe.loops.saving.checkpoints import STATE, TRAINING, Checkpoints, RunState
from rlframe.loops.saving.manifest import COMPLETE, RUN, claim_owner
from rlframe.megatron.checkpoint.checksums import CHECKSUMS
from rlframe.utils.errors import RlframeError
from tests.campaigns.trials import Outcome, Trial, write
from tests.multiprocess.program import QUICK, ROOT

NOBODY = 65534
STEPS = (1, 2, 3)
DIGEST = "digest"
NEWEST, BEFORE = "step-00000003", "step-00000002"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to damage a run's folder."""

    name: str
    apply: Callable[[Path], None]
    """Given `checkpoints/` of a copy."""
    names: str
    """What the sentence must name, in `checkpoints/`."""
    outcome: Outcome = Outcome.REFUSED
    offers: str = BEFORE
    as_nobody: bool = False
    """Asked by a user without rights of his own."""


def written_run(folder: Path) -> Path:
    """Returns a run's folder with three checkpoints of policy and critic, by the real writers."""
    from rlframe.megatron.checkpoint import files  # noqa: PLC0415 - torch is not needed to look at real runs
    from tests.unit.megatron.checkpoint.test_files import staged, tensors  # noqa: PLC0415

    folder.mkdir()
    claim_owner(folder, DIGEST)
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep_last=3))

    def stage(step: int, factor: float) -> Callable[[Path], Callable[[], dict[str, float]]]:
        def write_into(part: Path) -> Callable[[], dict[str, float]]:
            (part / "common.pt").write_bytes(b"common")
            (part / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
            job = staged(part, {name: value * step * factor for name, value in tensors().items()})
            files.seal(
                job,
                [
                    files.write(
                        job,
                    )
                ],
            )
            return lambda: {}

        return write_into

    for step in STEPS:
        state = RunState(step=step, num_optimizer_steps=2 * step, data={"epoch": 0, "seen": [step]}, results={"a": 0.5})
        checkpoints.save(state, stage(step, 1.0), auxiliary={CRITIC: stage(step, -3.0)})
    return folder


def real_run(folder: Path) -> Path:
    """Returns the folder of a run of three steps through the front door."""
    offline = {key: value for key, value in QUICK.items() if not key.startswith(("rollout", "data.max_prompt"))}
    settings = offline | {"steps": 3, "checkpoint.every_steps": 1, "checkpoint.keep_last": 3, "output": folder}
    command = [sys.executable, "-m", "rlframe.main", "--config-name", "sft_qwen3_moe_tiny"]
    command += [f"{key}={value}" for key, value in settings.items()]
    subprocess.run(command, cwd=folder.parent, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)
    return folder


def changed(change: Callable[[bytes], bytes], name: str) -> Callable[[Path], None]:
    """Returns what changes the content of a file of the newest checkpoint."""

    def apply(checkpoints: Path) -> None:
        file = checkpoints / NEWEST / name
        file.write_bytes(change(file.read_bytes()))

    return apply


def flip(position: float) -> Callable[[bytes], bytes]:
    """Returns what flips a bit at a place from 0, the beginning, to 1, the end."""

    def change(content: bytes) -> bytes:
        at = round(position * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    return change


def file_faults(run: Path, name: str) -> Iterator[Fault]:
    """Yields every damage of one file."""
    newest, before = (run / "checkpoints" / step / name for step in (NEWEST, BEFORE))
    differ = newest.read_bytes() != before.read_bytes()
    contents: dict[str, Callable[[bytes], bytes]] = {
        "emptied": lambda content: b"",
        "cut by a byte": lambda content: content[:-1],
        "cut in half": lambda content: content[: len(content) // 2],
        "a byte appended": lambda content: content + b"x",
        "a kilobyte appended": lambda content: content + bytes(1024),
        "all zero": lambda content: bytes(len(content)),
        "its end zero": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
        "a block moved": lambda content: content[len(content) // 2 :] + content[: len(content) // 2],
        **{f"a bit flipped at {place:g}": flip(place) for place in (0.0, 0.25, 0.5, 0.75, 1.0)},
    }

    def path(checkpoints: Path) -> Path:
        return checkpoints / NEWEST / name

    def of_before(checkpoints: Path) -> None:
        shutil.copyfile(checkpoints / BEFORE / name, path(checkpoints))

    def replace_by_folder(checkpoints: Path) -> None:
        path(checkpoints).unlink()
        path(checkpoints).mkdir()

    def replace_by_link(checkpoints: Path) -> None:
        path(checkpoints).unlink()
        path(checkpoints).symlink_to("nowhere")

    moves: dict[str, Callable[[Path], None]] = {
        "deleted": lambda checkpoints: path(checkpoints).unlink(),
        "renamed": lambda checkpoints: path(checkpoints).rename(path(checkpoints).with_suffix(".bak")) and None,
        "that of the step before": of_before,
        "replaced by a folder": replace_by_folder,
        "replaced by a dangling link": replace_by_link,
    } | {what: changed(change, name) for what, change in contents.items()}
    for what, apply in moves.items():
        # A file that is the same in both steps is no damage.
        outcome = Outcome.REFUSED if differ or what != "that of the step before" else Outcome.USED
        yield Fault(
            name=f"{name}: {what}", apply=apply, names=f"{NEWEST}/{Path(name).with_suffix('')}", outcome=outcome
        )
    if os.geteuid() == 0:
        yield Fault(
            name=f"{name}: unreadable",
            apply=lambda checkpoints: path(checkpoints).chmod(0),
            names=f"{NEWEST}/{name}",
            as_nobody=True,
        )


def field_faults(name: str, content: Any, where: tuple[Any, ...] = ()) -> Iterator[Fault]:
    """Yields an edit of every value of a JSON file of the newest checkpoint, its seal left as it is."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in items:
        if isinstance(value, dict | list) and value:
            yield from field_faults(name, value, (*where, key))
        edited = {int: lambda old: old + 1, float: lambda old: old * 2, str: lambda old: old[::-1] + "1"}
        change = edited.get(type(value), lambda old: [old])

        def apply(checkpoints: Path, key: Any = key, change: Callable[[Any], Any] | None = change) -> None:
            file = checkpoints / NEWEST / name
            lines = file.read_text().split("\n", 1)
            sealed = name != STATE
            whole = json.loads(file.read_text())
            inner = whole["content"] if sealed else whole
            for step in where:
                inner = inner[step]
            if change is None:
                del inner[key]
            else:
                inner[key] = change(inner[key])
            rest = json.dumps(whole["content"] if sealed else whole, separators=(",", ":"))
            file.write_text(f'{lines[0]}\n"content": {rest}}}\n' if sealed else json.dumps(whole))

        spot = ".".join(map(str, (*where, key)))
        yield Fault(name=f"{name}: {spot} edited", apply=apply, names=f"{NEWEST}/{name}")
        yield Fault(
            name=f"{name}: {spot} removed",
            apply=lambda checkpoints, apply=apply: apply(checkpoints, change=None),
            names=f"{NEWEST}/{name}",
        )


def folder_faults(run: Path) -> Iterator[Fault]:
    """Yields damage of whole folders, and copies, backups and foreign folders beside the checkpoints."""
    parts = [part for part in (TRAINING, CRITIC) if (run / "checkpoints" / NEWEST / part).is_dir()]
    for part in parts:

        def swap(checkpoints: Path, part: str = part) -> None:
            shutil.rmtree(checkpoints / NEWEST / part)
            shutil.copytree(checkpoints / BEFORE / part, checkpoints / NEWEST / part)

        def stray(checkpoints: Path, part: str = part) -> None:
            (checkpoints / NEWEST / part / "__9_0.distcp").write_bytes(b"more")

        def remove(checkpoints: Path, part: str = part) -> None:
            shutil.rmtree(checkpoints / NEWEST / part)

        yield Fault(name=f"{part}/ of the step before", apply=swap, names=f"{NEWEST}/{part}")
        yield Fault(name=f"{part}/ deleted", apply=remove, names=f"{NEWEST}/{part}")
        yield Fault(name=f"{part}/ with a further file", apply=stray, names=f"{NEWEST}/{part}/__9_0.distcp")
    if CRITIC in parts:

        def exchange(checkpoints: Path) -> None:
            newest = checkpoints / NEWEST
            (newest / TRAINING).rename(newest / "aside")
            (newest / CRITIC).rename(newest / TRAINING)
            (newest / "aside").rename(newest / CRITIC)

        yield Fault(name="training/ and critic/ exchanged", apply=exchange, names=f"{NEWEST}/")
    yield Fault(
        name="a further folder",
        apply=lambda checkpoints: (checkpoints / NEWEST / "more").mkdir(),
        names=f"{NEWEST}/more",
    )
    yield Fault(name="the folder emptied", apply=lambda checkpoints: _emptied(checkpoints / NEWEST), names=NEWEST)
    yield Fault(name="a file of its name", apply=lambda checkpoints: _as_file(checkpoints / NEWEST), names=NEWEST)
    for name in ("step-best", f"{NEWEST}-backup", "backup", "step-9", "zzz", ".hidden", f"{NEWEST}.old"):
        yield Fault(
            name=f"a copy named {name}",
            apply=lambda checkpoints, name=name: shutil.copytree(checkpoints / BEFORE, checkpoints / name) and None,
            names=name,
            outcome=Outcome.USED,
        )
    yield Fault(
        name="a copy under the name of a later step",
        apply=lambda checkpoints: shutil.copytree(checkpoints / BEFORE, checkpoints / "step-00000009") and None,
        names="step-00000009",
        offers=NEWEST,
    )


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


def faults(run: Path) -> Iterator[Fault]:
    """Yields every fault of a run's newest checkpoint."""
    newest = run / "checkpoints" / NEWEST
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        name = file.relative_to(newest).as_posix()
        yield from file_faults(run, name)
        if name == STATE or file.name in (COMPLETE, CHECKSUMS):
            content = json.loads(file.read_text())
            yield from field_faults(name, content if name == STATE else content["content"])
    yield from folder_faults(run)
    yield from identity_faults()


def identity_faults() -> Iterator[Fault]:
    """Yields damage of the file that says whose the checkpoints are."""

    def of_another_run(checkpoints: Path) -> None:
        (checkpoints.parent / RUN).unlink()
        checkpoints.rename(checkpoints.parent / "aside")
        claim_owner(checkpoints.parent, DIGEST)
        (checkpoints.parent / "aside").rename(checkpoints)

    yield Fault(name="checkpoints of another run", apply=of_another_run, names=NEWEST, offers="")
    for what, change in (("a bit flipped", flip(0.5)), ("emptied", lambda content: b"")):
        yield Fault(
            name=f"{RUN}: {what}",
            apply=lambda checkpoints, change=change: (
                (checkpoints.parent / RUN).write_bytes(change((checkpoints.parent / RUN).read_bytes())) and None
            ),
            names=f"../{RUN}",
            offers="",
        )


def attempt(fault: Fault, run: Path, aside: Path) -> Trial:
    """Returns what became of a copy of `run` with the fault."""
    copy = aside / "run"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    checkpoints = copy / "checkpoints"
    fault.apply(checkpoints)
    started = time.monotonic()
    try:
        if fault.as_nobody:
            os.seteuid(NOBODY)
        found = Checkpoints(checkpoints, CheckpointConfig()).latest()
        outcome = Outcome.USED if found == checkpoints / NEWEST else Outcome.WRONG
        said = f"goes on from {found}"
    except RlframeError as error:
        said = str(error)
        named = str((checkpoints / fault.names).resolve()) in said or str(checkpoints / fault.names) in said
        outcome = Outcome.REFUSED if named and fault.offers in said else Outcome.WRONG
    except Exception as error:  # a trial that went wrong is written down
        outcome, said = Outcome.WRONG, f"{type(error).__name__}: {error}"
    finally:
        if fault.as_nobody:
            os.seteuid(0)
    seconds = time.monotonic() - started
    if outcome is not fault.outcome:
        outcome = Outcome.WRONG
    text = said.replace(str(aside), "").splitlines()[0][:300]
    return Trial(name=fault.name, outcome=outcome, said=text, seconds=seconds)


def main(arguments: list[str]) -> None:
    """Tries every fault of both runs; with the argument `written` only of the one that starts no process."""
    trials = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Whoever has no rights of his own must get as far as the file that he may not read.
        folder.chmod(0o755)
        runs = [written_run(folder / "written")]
        if "written" not in arguments:
            runs.append(real_run(folder / "real"))
        for run in runs:
            for fault in faults(run):
                trials.append(attempt(fault, run, folder))
                if trials[-1].outcome is Outcome.WRONG:
                    sys.stderr.write(f"{run.name}: {trials[-1]}\n")
    command = " ".join(["python -m tests.campaigns.checkpoints", *arguments])
    summary = write("checkpoints", trials, command=command)
    sys.stdout.write(f"{summary.row()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
