"""Faults in checkpoints and their proof."""

from tests.mutations.mutation import Mutation, faults

CHECKPOINTING = "tests/unit/loops/saving/test_checkpointing.py"
WRITER = "tests/unit/megatron/checkpoint/test_writer.py"
FILES = "tests/unit/megatron/checkpoint/test_files.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/loops/saving/checkpoints.py",
        CHECKPOINTING,
        (
            "the newest is the oldest",
            "*older, newest = sorted(self._named(), key=step_of)",
            "newest, *older = sorted(self._named(), key=step_of)",
        ),
        ("damage is not looked for", "if fault := self._fault(newest):", "if fault := None:"),
        (
            "the new one may be pruned",
            "wanted = {new, *paths[-self.config.keep_last :], *self._best(own)}",
            "wanted = {*paths[: self.config.keep_last], *self._best(own)}",
        ),
        ("the best are not kept", "*self._best(own)}", "}"),
        (
            "the worst are kept",
            "sign = 1 if self.config.best_mode is BestMode.MAX else -1",
            "sign = -1 if self.config.best_mode is BestMode.MAX else 1",
        ),
        ("everything is kept", "if path not in wanted:", "if False:"),
    ),
    *faults(
        "rlframe/loops/saving/manifest.py",
        CHECKPOINTING + " tests/campaigns/samples/test_checkpoints.py",
        ("a length is not compared", "if size != length:", "if False:"),
        ("a checksum is not compared", "if found != crc32:", "if False:"),
        (
            "a file too many is taken",
            "if name != COMPLETE and name not in (parents if path.is_dir() else expected):",
            "if False:",
        ),
    ),
    *faults(
        "rlframe/megatron/checkpoint/staging.py",
        FILES,
        ("what is staged changes with the run", "return place.copy_(value, non_blocking=True)", "return value"),
        ("tensors are staged over each other", "self._used = first + num_bytes", "self._used = first"),
    ),
    *faults(
        "rlframe/megatron/checkpoint/writer.py",
        WRITER + " " + FILES,
        ("checksums are of nothing", "total = combined(total, crc32, length)", "total = 0"),
        ("what reads back is not compared", "if crc32 != written.crc32:", "if False:"),
        ("the end is not read back", "if self._wants(written):", "if self._wants(written) and not written.offset:"),
        ("what was padded stays", "os.ftruncate(self.descriptor, self.ends[-1])", "pass"),
        ("the file is not flushed", "os.fsync(self.descriptor)", "pass"),
    ),
    *faults(
        "rlframe/loops/saving/background.py",
        "tests/unit/loops/saving/test_background.py",
        ("ranks of a host are not added up", "needed[node] += room.needed_bytes", "needed[node] = room.needed_bytes"),
        ("all of the memory is used", "needed[node] <= SHARE * free[node]", "needed[node] <= free[node]"),
    ),
    *faults(
        "rlframe/megatron/checkpoint/pieces.py",
        "tests/unit/megatron/checkpoint/test_pieces.py",
        ("part of a tensor may be missing", "if count != needed and not piece.allow_shape_mismatch:", "if False:"),
        ("padding keeps what was there", "piece.data.detach().zero_()", "pass"),
        ("each piece is the first", "self._tensors[index.fqn][index.index]", "self._tensors[index.fqn][0]"),
        ("objects are unpickled", "torch.load(value, weights_only=True)", "torch.load(value, weights_only=False)"),
    ),
]
