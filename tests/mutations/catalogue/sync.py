"""Faults in recorded layouts, plans, copies and the proof of weights."""

from tests.mutations.mutation import Mutation, faults

PLAN = "tests/unit/weight_sync/test_plan.py tests/unit/weight_sync/test_plan_properties.py"
CHANNEL = "tests/unit/weight_sync/test_channel.py"
DIGEST = "tests/unit/weight_sync/test_digest.py"
HOLD = "tests/unit/weight_sync/test_hold.py"
LAYOUT = "tests/unit/weight_sync/test_layout.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/weight_sync/layout/boxes.py",
        PLAN,
        (
            "rows of an intersection are too many",
            "rows = min(self.row + self.rows, other.row + other.rows) - row",
            "rows = max(self.row + self.rows, other.row + other.rows) - row",
        ),
        ("what is left forgets what is below", "Region(below, self.row + self.rows - below, self.col, self.cols),", ""),
        ("what is left forgets what is right", "Region(part.row, part.rows, right, self.col + self.cols - right),", ""),
        ("a region begins at its box", "(region.row - self.row) * self.row_stride", "0 * self.row_stride"),
        (
            "columns are taken for rows",
            "(region.col - self.col) * self.col_stride",
            "(region.col - self.col) * self.row_stride",
        ),
    ),
    *faults(
        "rlframe/weight_sync/plan/piecewise.py",
        PLAN,
        (
            "the last piece is not copied",
            "missing = still_missing\n            if not missing:",
            "missing = still_missing[1:]\n            if not missing:",
        ),
        (
            "pieces are joined that do not touch",
            "b.offset - a.offset == first.rows * a.row_stride for a, b in sides",
            "b.offset - a.offset >= first.rows * a.row_stride for a, b in sides",
        ),
        (
            "a joined copy loses its second half",
            "first.rows + second.rows, first.cols, first.read, first.write)",
            "first.rows, first.cols, first.read, first.write)",
        ),
        (
            "the farthest replica is read",
            "return min(holders, key=lambda holder: (distance",
            "return max(holders, key=lambda holder: (distance",
        ),
        ("one replica carries all", "self._load[rank] += common.size", "self._load[rank] += 0"),
    ),
    *faults(
        "rlframe/weight_sync/plan/tables.py",
        PLAN,
        ("an array's replica carries all", "load[rank] += size", "load[rank] += 0"),
        (
            "the farthest replica of an array is read",
            "nearest = [min(far[rank] for rank in members) for members",
            "nearest = [max(far[rank] for rank in members) for members",
        ),
        ("an offset forgets the column", "right * held[:, COL_STRIDE]", "0 * held[:, COL_STRIDE]"),
        ("a hole is filled with nothing", "if (filled != boxes[:, ROWS] * boxes[:, COLS]).any():", "if False:"),
    ),
    *faults(
        "rlframe/weight_sync/plan/merging.py",
        PLAN,
        (
            "runs are joined that do not touch",
            "(after[:, OFFSETS] - before[:, OFFSETS] == before[:, [count]] * before[:, strides]).all(1)",
            "(after[:, OFFSETS] - before[:, OFFSETS] == before[:, [count]] * before[:, strides]).any(1)",
        ),
        ("a run forgets its rows", "sizes[first[grown], axis] = sums[grown, axis]", "pass"),
    ),
    *faults(
        "rlframe/weight_sync/plan/planner.py",
        PLAN,
        ("shapes that differ are taken", "if shapes.setdefault(name, shape) != shape:", "if False:"),
        (
            "bytes are elements",
            'mine.column("rows") * mine.column("cols") * _itemsizes(mine, itemsize)',
            'mine.column("rows") * mine.column("cols")',
        ),
    ),
    *faults(
        "rlframe/weight_sync/layout/memory.py",
        LAYOUT,
        (
            "loading forgets the row",
            "matrix[box.row : box.row + box.rows, box.col : box.col + box.cols])",
            "matrix[: box.rows, box.col : box.col + box.cols])",
        ),
        (
            "exporting forgets the column",
            "matrix[box.row : box.row + box.rows, box.col : box.col + box.cols].copy_(box.view(parameters))",
            "matrix[box.row : box.row + box.rows, : box.cols].copy_(box.view(parameters))",
        ),
        ("padding is left as it is", "_padding(padding, parameters).zero_()", "_padding(padding, parameters)"),
    ),
    *faults(
        "rlframe/weight_sync/proof/shares.py",
        PLAN,
        ("a hole is not noticed", "if (held := sum(region.size for region in regions)) != rows * cols:", "if False:"),
    ),
    *faults(
        "rlframe/weight_sync/proof/shares.py",
        CHANNEL,
        (
            "replicas are not compared",
            "found[self._replicas] = shares[self._replicas] != shares[self._leaders]",
            "pass",
        ),
        (
            "replicas count twice",
            "return np.where(self._first, shares, np.uint64(0)).sum(axis=0, dtype=np.uint64)",
            "return shares.sum(axis=0, dtype=np.uint64)",
        ),
    ),
    *faults(
        "rlframe/weight_sync/channel.py",
        CHANNEL,
        (
            "engines sample what is not proved",
            "if (engines is None or engine in engines) and (names := connection.differing(engine, rows, totals)):",
            "if False:",
        ),
        ("an old version is published", "if version <= self._version:", "if False:"),
        (
            "an engine stays open after a failure",
            'self._destinations.fail(f"the sync of version {version} failed: {error}", engines=engines)',
            "pass",
        ),
    ),
    *faults(
        "rlframe/weight_sync/channel.py",
        HOLD,
        (
            "what comes from the copy that is held is not proved",
            "if names := connection.differing(engine, rows, self._totals):",
            "if False:",
        ),
        (
            "the copy that is held is that of the first version",
            "# Engines sample on meanwhile.\n        self._keep()",
            "# Engines sample on meanwhile.",
        ),
        (
            "new ranks of the trainer hold nothing",
            "        self._version = version\n        self._keep()\n\n    @property",
            "        self._version = version\n\n    @property",
        ),
    ),
    *faults(
        "rlframe/weight_sync/hold.py",
        HOLD,
        ("replicas are all held", "if part[0] in wanted and part not in seen}", "if part[0] in wanted}"),
        ("an engine elsewhere is believed to reach the copies", "if info.host != source.host:", "if False:"),
    ),
    *faults(
        "rlframe/weight_sync/host_copy.py",
        HOLD,
        ("the weights are not copied again", "            copy.copy_(original)\n", "            pass\n"),
    ),
    *faults(
        "rlframe/loops/evaluation/evaluate.py",
        "tests/unit/loops/evaluation/test_evaluate.py",
        (
            "engines that only evaluate keep old weights",
            "if self.weight_sync and self.weight_sync.policy_version != step:",
            "if False:",
        ),
        (
            "a sync does not wait for an evaluation that shares its engines",
            "            return self.step is not None\n",
            "            return False\n",
        ),
    ),
    *faults(
        "rlframe/weight_sync/proof/terms.py",
        DIGEST,
        ("the digest is separable", "    mix(mixed)\n", ""),
        (
            "rows are not told apart",
            "mixed = words ^ rows.mixers[:, None]",
            "mixed = words ^ np.zeros_like(rows.mixers[:, None])",
        ),
        (
            "columns are not told apart",
            "    mixed ^= cols.mixers\n    mix(mixed)\n    mixed *= cols.weights\n",
            "    mix(mixed)\n",
        ),
        (
            "the seed is not looked at",
            "return int(splitmix64(seed ^ stream, 1)[0])",
            "return int(splitmix64(stream, 1)[0])",
        ),
    ),
    *faults(
        "rlframe/weight_sync/proof/digest.py",
        DIGEST,
        ("twins are not compared", "if whole(twin) != parts[twin.region]:", "if False:"),
        (
            "a shard counts its columns from 0",
            "first, count = region.col // unit, region.cols // unit",
            "first, count = 0, region.cols // unit",
        ),
        (
            "a shard counts its rows from 0",
            "row_keys.part(region.row + start, len(part))",
            "row_keys.part(start, len(part))",
        ),
    ),
    *faults(
        "rlframe/weight_sync/audit.py",
        "tests/unit/weight_sync/test_audit.py",
        (
            "the trainer is not audited",
            "if (column := _first(before.held != now.held)) is not None:",
            "if (column := None) is not None:",
        ),
        ("engines are not audited", "for rank, name in changed.items():", "for rank, name in {}.items():"),
    ),
    *faults(
        "rlframe/weight_sync/frozen.py",
        "tests/unit/weight_sync/test_frozen.py",
        (
            "engines without a trainer are believed",
            "if names := connection.differing(engine, rows, self._totals):",
            "if names := []:",
        ),
    ),
]
