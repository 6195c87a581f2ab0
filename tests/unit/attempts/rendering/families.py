"""Families of models: the inference templates that PyPI packages ship, each with a byte-level tokenizer that has the
family's tokens. tests/requirements-templates.txt has the packages; without them, what needs them is skipped."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlframe.attempts.rendering.config import History, RenderingConfig
from rlframe.attempts.rendering.renderer import Renderer
from rlframe.data.config import DataConfig

PACKAGES = Path(os.environ.get("RLFRAME_TEMPLATES", Path(sys.prefix) / "templates"))
"""Folder of the packages."""
WRITE_MISTRAL = """
import json
from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
made = {
    name: build_chat_template(
        TemplateConfig(
            version=TokenizerVersion[name], thinking_support=name == "v13", use_special_token_variables=True
        )
    )
    for name in ("v3", "v7", "v11", "v13")
}
print(json.dumps(made))
"""
MERGES = [
    ("<", "|"),
    ("|", ">"),
    ("t", "h"),
    ("th", "e"),
    ("\u010a", "\u010a"),
    ("i", "n"),
    (">", "\u010a"),
    ("{", '"'),
]
"""Merges that join characters over the borders of what templates write, where nothing forbids it."""
CALL_WORDS = ("<tool_call>", "</tool_call>")
WORDS = (*CALL_WORDS, "<tool_response>", "</tool_response>", "<think>", "</think>")


def named(names: str, form: str) -> tuple[str, ...]:
    """Tokens of a form, such as `<|{}|>`, by their names."""
    return tuple(form.format(name) for name in names.split())


CHATML = named("endoftext im_start im_end vision_start vision_end image_pad video_pad", "<|{}|>")
GLM = (*named("endoftext system user assistant observation", "<|{}|>"), "[gMASK]", "<sop>")
LLAMA = named("begin_of_text end_of_text start_header_id end_header_id eot_id eom_id python_tag", "<|{}|>")
HARMONY = named("endoftext start end message channel constrain return call", "<|{}|>")
PLAIN_DEEPSEEK = named("begin_of_sentence end_of_sentence", "<\uff5c{}\uff5c>")
DEEPSEEK = tuple(token.replace("_", "\u2581") for token in PLAIN_DEEPSEEK)
DEEPSEEK_WORDS = tuple(
    token.replace("_", "\u2581")
    for token in named(
        "User Assistant tool_calls_begin tool_calls_end tool_call_begin tool_call_end tool_sep tool_outputs_begin "
        "tool_outputs_end tool_output_begin tool_output_end",
        "<\uff5c{}\uff5c>",
    )
) + ("<think>", "</think>")
MISTRAL = ("<s>", "</s>", *named("TOOL_CALLS TOOL_CONTENT CALL_ID ARGS", "[{}]")) + tuple(
    token
    for name in "INST AVAILABLE_TOOLS TOOL_RESULTS SYSTEM_PROMPT THINK".split()
    for token in (f"[{name}]", f"[/{name}]")
)
GEMMA3 = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
BRACES = "turn tool tool_call tool_response channel"
GEMMA4 = ("<bos>", "<eos>", '<|"|>', "<|think|>", *named(BRACES, "<|{}>"), *named(BRACES, "<{}|>"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A chat template, and what it can write."""

    template: str
    """A file of trl's chat_templates, or a version of mistral-common's."""
    special: tuple[str, ...]
    """Special tokens."""
    words: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str | None = None
    eos: str
    form: str = "NoCalls"
    """Class of the form of tool calls that `auto` finds."""
    style: str = "none"
    """Form of reasoning that `auto` finds."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    calls: int = 2
    """Greatest number of calls in a turn."""
    lists_tools: bool = True
    """Whether the template writes the offered tools."""
    reasons: bool = False
    """Whether turns have reasoning."""
    both: bool = True
    """Whether a turn can have content and calls."""
    ends: tuple[str, str] | None = None
    """Tokens that the policy samples at the end of a turn before a user and before a tool, where the template writes
    none after the last turn."""


QWEN = Family(template="qwen2_5", special=CHATML, words=CALL_WORDS, eos="<|im_end|>", form="Hermes")
QWEN3 = replace(QWEN, template="qwen3", words=WORDS, style="think", reasons=True)
LLAMA31 = Family(template="llama3_1", special=LLAMA, bos=LLAMA[0], eos="<|eot_id|>", form="Llama", calls=1, both=False)
GLM45 = Family(
    template="glm4moe",
    special=GLM,
    words=(*WORDS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    eos="<|endoftext|>",
    form="Glm",
    style="think",
    reasons=True,
    ends=("<|user|>", "<|observation|>"),
)
V3 = Family(
    template="deepseekv3",
    special=DEEPSEEK,
    words=DEEPSEEK_WORDS,
    bos=DEEPSEEK[0],
    eos=DEEPSEEK[1],
    form="DeepSeek",
    style="think",
    reasons=True,
    lists_tools=False,
)
GEMMA = Family(
    template="gemma4_v5", special=GEMMA4, bos="<bos>", eos="<turn|>", form="Gemma", style="gemma", both=False
)
MISTRAL3 = Family(template="mistral:v3", special=MISTRAL, bos="<s>", eos="</s>", form="Mistral", both=False)
FAMILIES = {
    "qwen2.5": QWEN,
    "qwen3": QWEN3,
    "qwen3-off": replace(QWEN3, kwargs={"enable_thinking": False}, reasons=False),
    "qwen3-2507": replace(QWEN3, template="qwen3_instruct_2507", style="none", reasons=False),
    "qwen3.5": replace(QWEN3, template="qwen3_5_think", form="QwenXml"),
    "qwen3.6-kept": replace(QWEN3, template="qwen3_6", form="QwenXml", kwargs={"preserve_thinking": True}),
    "llama3.1": LLAMA31,
    "llama3.2": replace(LLAMA31, template="llama3_2"),
    "glm4.5": GLM45,
    "glm4.5-off": replace(GLM45, kwargs={"enable_thinking": False}, reasons=False),
    "deepseek-v3": V3,
    "deepseek-r1": replace(V3, template="deepseek_r1_distill", calls=0),
    "gpt-oss": Family(
        template="gptoss",
        special=HARMONY,
        eos="<|return|>",
        form="Harmony",
        style="harmony",
        reasons=True,
        calls=1,
        both=False,
    ),
    "gemma3": Family(template="gemma3", special=GEMMA3, bos="<bos>", eos="<end_of_turn>", calls=0),
    "gemma4": replace(GEMMA, kwargs={"enable_thinking": True}, reasons=True),
    "gemma4-off": GEMMA,
    "mistral-v3": MISTRAL3,
    "mistral-v7": replace(MISTRAL3, template="mistral:v7", both=True),
    "mistral-v11": replace(MISTRAL3, template="mistral:v11", both=True),
    "mistral-v13": replace(MISTRAL3, template="mistral:v13", both=True, style="brackets", reasons=True),
}


@cache
def template_of(name: str) -> str:
    """The chat template of a family; skips where its package is not installed."""
    if not PACKAGES.is_dir():
        pytest.skip("no packages with templates: see tests/requirements-templates.txt")
    template, _, version = FAMILIES[name].template.partition(":")
    if version:
        return mistral_templates()[version]
    return (PACKAGES / "trl" / "chat_templates" / f"{template}.jinja").read_text(encoding="utf-8")


@cache
def mistral_templates() -> dict[str, str]:
    """Mistral's templates by version. Another process makes them, because transformers would notice the package."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGES)}
    made = subprocess.run([sys.executable, "-c", WRITE_MISTRAL], env=environment, check=True, capture_output=True)
    return json.loads(made.stdout)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges and the family's tokens."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(one + other for one, other in MERGES)]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(word, special=False, normalized=False) for word in family.words])
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    others = [token for token in family.special if token not in (family.bos, family.eos)]
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=family.bos, eos_token=family.eos, extra_special_tokens=others
    )
    made.chat_template = template_of(name)
    return made


def renderer_of(name: str, history: History = History.APPEND, **settings: Any) -> Renderer:
    """A renderer for the family."""
    return Renderer(tokenizer_of(name), RenderingConfig(history=history, **settings), data=data_of(name))


def data_of(name: str) -> DataConfig:
    """Settings of the data with which the family's prompts are rendered."""
    return DataConfig(chat_template_kwargs=FAMILIES[name].kwargs or None)
