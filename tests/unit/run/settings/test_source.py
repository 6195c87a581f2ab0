"""What is read from the source of a dataclass is what Python makes of it."""

import importlib
import subprocess
import sys
from dataclasses import MISSING, fields
from enum import StrEnum
from typing import get_type_hints

import pytest

from rlframe.run.choices import CHOICES, OPTIONS
from rlframe.run.config import RunConfig
from rlframe.run.settings.kinds import _yaml, default_of, kind_of
from rlframe.run.settings.source import Class, named, settings_class
from rlframe.run.settings.tree import RUN, component, components, kinds_of_components, section, whole
from rlframe.utils.build import as_dict

COMPONENTS = [(key, name) for key in kinds_of_components() for name in components(key) if key in ("rollout", *OPTIONS)]
COMPONENTS += [("algorithm", name) for name in components("algorithm")]


def assert_same(declared: Class, real: type) -> None:
    """Names, order and defaults of the fields, and a docstring of each; of its sections too."""
    own = declared.fields()
    assert [each.name for each in own] == [each.name for each in fields(real)]
    hints = get_type_hints(real)
    for read, field in zip(own, fields(real), strict=True):
        kind = kind_of(read.module, read.annotation)
        if kind.section:
            section_type = next(
                each
                for each in (hints[field.name], *getattr(hints[field.name], "__args__", ()))
                if hasattr(each, "__dataclass_fields__")
            )
            assert kind.section.node.name == section_type.__name__
            assert_same(kind.section, section_type)
            continue
        default = field.default if field.default_factory is MISSING else field.default_factory()
        assert default_of(read) == (
            None if default is MISSING else _yaml(as_dict(default)) if default != {} else "{}"
        ), read.name
        if isinstance(default, StrEnum):
            assert set(kind.values) >= {str(each) for each in type(default)}


def test_the_settings_of_a_run_are_those_of_its_dataclasses() -> None:
    assert_same(named(*RUN), RunConfig)
    assert len(whole().all_settings()) > 200


@pytest.mark.parametrize(("key", "name"), COMPONENTS)
def test_the_settings_of_a_component_are_those_of_its_dataclass(key: str, name: str) -> None:
    module = f"{CHOICES.get(key) or OPTIONS[key][0]}.{name}"
    assert_same(settings_class(module), importlib.import_module(module).CONFIG)


def test_every_setting_has_a_docstring_and_every_section_a_text() -> None:
    sections = [part for top in [whole(), *(component(*each) for each in COMPONENTS)] for part in top.walk()]
    assert [part.key for part in sections if not part.text] == []
    assert [each.key for part in sections for each in part.settings if not each.text] == []


@pytest.mark.parametrize(
    ("key", "words", "default"),
    [
        ("prompts_per_step", "int, 1 to 16777216", "32"),
        ("train.optimizer.lr", "float, above 0, at most 10", "1e-06"),
        ("train.optimizer.schedule", "one of constant, linear, cosine, wsd", "constant"),
        ("train.optimizer.decay_steps", "int, 1 to 1000000000 (null: the whole run) or null", "null"),
        ("data.shuffle", "true or false", "true"),
        ("train.lora.target_modules", "list of str", "[all-linear]"),
        ("reward.parts.NAME.timeout_s", "float, above 0, at most 604800 (a week at most) or null", "null"),
        ("teacher.path", "str", None),
    ],
)
def test_types_and_defaults_are_words(key: str, words: str, default: str | None) -> None:
    (setting,) = [each for each in whole().all_settings() if each.key == key]
    assert (setting.kind.words, setting.default) == (words, default)


def test_fields_of_a_diamond_are_in_pythons_order() -> None:
    grpo = section("algorithm", settings_class("rlframe.algorithms.grpo"))
    assert [each.key for each in grpo.settings[:2]] == ["algorithm.name", "algorithm.group_size"]
    assert grpo.settings[0].default == "grpo"


@pytest.mark.later
def test_help_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys; sys.argv = ['rlframe', '--help']\n"
        "from rlframe.main import main; main()\n"
        "print(sorted({'torch', 'transformers', 'ray', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "train.optimizer.lr=1e-06  (float, above 0, at most 10)" in done.stdout
