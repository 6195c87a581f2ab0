"""Faults in what a run says of itself: statistics, norms by part, throughput, alerts."""

from tests.mutations.mutation import Mutation, faults

UPDATES = "tests/multiprocess/megatron/training/test_updates.py"
RESPONSES = "tests/unit/ops/statistics/test_responses.py"
ALERTS = "tests/unit/loops/alerts/test_alerts.py"
THROUGHPUT = "tests/unit/loops/reporting/test_throughput.py"
BUSY = "tests/unit/attempts/test_busy.py"

MUTATIONS: list[Mutation] = [
    *faults(
        "rlframe/megatron/worker/norms.py",
        UPDATES,
        ("a rank's norm is the world's", "        dist.all_reduce(values)\n", ""),
        ("the decay is no part of the update", "alpha=decay", "alpha=0.0"),
        ("moments are not corrected for their start", "/ (1 - beta1**num_steps)", "/ 1"),
        ("norms of layers are attention", '    "norms": re.compile(r"norm[._](weight|bias)$"),\n', ""),
    ),
    *faults(
        "rlframe/ops/statistics/responses.py",
        RESPONSES,
        (
            "quantiles are one rank low",
            "math.ceil(fraction * len(ordered)) - 1",
            "math.ceil(fraction * len(ordered)) - 2",
        ),
        ("4-grams of all sequences are compared", "sequence[starts] << PLACE_BITS | found", "found"),
        ("4-grams cross into the next sequence", ">= NGRAM)", ">= 0)"),
    ),
    *faults(
        "rlframe/loops/alerts/rules.py",
        ALERTS,
        (
            "steps are counted, not steps in a row",
            "else 0\n        if self._in_a_row",
            "else self._in_a_row\n        if self._in_a_row",
        ),
        (
            "a gap is compared with the steps before",
            "del values[first : max(first, len(values) - self.config.steps)]",
            "del values[: -self.config.steps - first]",
        ),
        ("any rise is learning", "now - before >= self.config.errors * error", "now >= before"),
        ("faster is slow", "last * self.config.factor <= earlier", "last >= self.config.factor * earlier"),
    ),
    *faults(
        "rlframe/loops/alerts/watch.py",
        ALERTS,
        ("an alert is said at each step", "if name not in self._said", "if name"),
        (
            "a resumed run knows nothing",
            '                self._said |= {name for name, _ in self._found(record["step"], record)}\n',
            "                pass\n",
        ),
        ("a resumed run goes on though an alert does", "if name in self._config.stop", "if self._config.stop is name"),
    ),
    *faults(
        "rlframe/loops/stop.py",
        ALERTS,
        ("an alert saves what is not due", "(self._asked_by and self._saves)", "self._asked_by"),
    ),
    *faults(
        "rlframe/loops/reporting/throughput.py",
        THROUGHPUT,
        ("sampled tokens see the prompt only", "sampled * (2.0 * lengths - sampled)", "sampled * (lengths - sampled)"),
        ("epochs count once", "shape.epochs if passes == TRAINING else 1", "1"),
        (
            "lengths are averaged over sequences",
            "(_squares(lengths) - _squares(others)) / own",
            "lengths.mean()",
        ),
    ),
    *faults(
        "rlframe/attempts/busy.py",
        BUSY,
        (
            "calls that overlap count twice",
            "        if not self.running:\n            self._since = time",
            "        if True:\n            self._since = time",
        ),
    ),
]
