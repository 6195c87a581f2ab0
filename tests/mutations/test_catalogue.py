"""The catalogue of planted faults fits the code: nothing is planted here, see `python -m tests.mutations`."""

import ast
from collections import Counter
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS

ROOT = Path(__file__).parents[2]


def test_the_text_of_every_fault_stands_once_in_its_file_and_changes():
    sources = {name: (ROOT / name).read_text(encoding="utf-8") for name in {each.file for each in MUTATIONS}}
    found = {each.name: sources[each.file].count(each.old) for each in MUTATIONS}
    assert {name: count for name, count in found.items() if count != 1} == {}
    assert [each.name for each in MUTATIONS if each.old == each.new] == []


def test_every_fault_is_valid_python():
    for each in MUTATIONS:
        source = (ROOT / each.file).read_text(encoding="utf-8")
        ast.parse(source.replace(each.old, each.new), each.file)


def test_the_tests_of_every_fault_exist():
    for node in {node for each in MUTATIONS for node in each.test.split()}:
        file, _, function = node.partition("::")
        assert (ROOT / file).is_file(), node
        assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), node


def test_faults_have_names_of_their_own_and_there_are_enough():
    assert [name for name, count in Counter(each.name for each in MUTATIONS).items() if count > 1] == []
    assert len(MUTATIONS) >= 150
