"""Templates: what they see, what transformers would render, and what they cannot do."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from swarm.text.template import TemplateError, render
from swarm.text.tokenizer import PLAIN_TEMPLATE, Tokenizer

CHATML = (
    "{%- if tools %}{{- tools | tojson }}{%- endif %}\n"
    "{% for message in messages %}\n"
    "    {%- if loop.first and message['role'] != 'system' %}\n"
    "        {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}\n"
    "    {%- endif %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim }}\n"
    "    {{- '<|im_end|>' + '\\n' }}\n"
    "{% endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}\n"
)
OTHERS = {
    "bos": "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n"
    "{% endfor %}",
    "bos in a macro": "{% macro line(m) %}{{ bos_token + m.content }}{% endmacro %}\n"
    "  {% for m in messages %}\n  {{ line(m) }}\n  {% endfor %}",
    "leading white space": "\n\n  {% if true %}\n  {{ bos_token }}x{{ messages[0].content }}\n\n"
    "  {%- endif %}\n\n",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ ns.n }}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}\n"
    "{% set inner = 'y' %}{{ m.content }}{% endgeneration %}{{ inner }}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2, sort_keys=true) }}"
    "{{ {'<a>': '\u00e9'} | tojson }}",
    "undefined": "{{ messages[0].content }}{{ date_string is defined }}{{ enable_thinking }}"
    "{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}",
    "dict": "{% set d = dict(a=messages[0].content) %}{% for k, v in d.items() %}{{ k }}{{ v }}"
    "{% endfor %}",
    "split": "{% set parts = messages[-1]['content'].split('</think>') %}{{ parts[-1].lstrip() }}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [{"role": "user", "content": "  \n<b>& \u00e9\U0001f600</b>\t "}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>hm</think> Hello"},
        {"role": "user", "content": "Again, {{ 7 * 7 }} {% raw %}"},
    ],
]


def fails(text: str, *prompts: str, system: str = "", max_chars: int = 1000) -> TemplateError:
    with pytest.raises(TemplateError) as caught:
        render(text, system, list(prompts or ("x",)), max_chars)
    return caught.value


# -- equal to transformers -----------------------------------------------------------------------


def model_folder(folder: Path, template: str, where: str) -> Path:
    """A tokenizer of a few words, with a chat template as models ship them."""
    words = {word: i for i, word in enumerate(["<s>", "</s>", "<|im_end|>", "a", '"\\\U0001f600'])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>", '"\\\U0001f600'])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": '"\\\U0001f600', "special": True, "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
    }
    if where == "config":
        config["chat_template"] = template
    elif where == "list":
        config["chat_template"] = [
            {"name": "tool_use", "template": "tools"},
            {"name": "default", "template": template},
        ]
    else:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        config["chat_template"] = "not this one"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("where", ["config", "list", "file"])
@pytest.mark.parametrize("template", [CHATML, *OTHERS.values()], ids=["ChatML", *OTHERS])
def test_a_chat_renders_as_in_transformers(template: str, where: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = model_folder(tmp_path, template, where)
    theirs = AutoTokenizer.from_pretrained(folder)
    text = Tokenizer.from_folder(folder).chat_template
    assert text is not None
    for chat in CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert render(text, "", [chat]) == [expected]
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    assert render(text, "", ["What is 2 + 3?"]) == render(text, "", [question])
    told = [{"role": "system", "content": "Be brief."}, *question]
    assert render(text, "Be brief.", ["What is 2 + 3?"]) == render(text, "", [told])


# -- what a template sees ------------------------------------------------------------------------


def test_plain_is_the_prompt_as_it_is() -> None:
    texts = ["2 + 3 = ", "  {{ 7 * 7 }}\n", "<b>\u00e9"]
    assert render(PLAIN_TEMPLATE, "", texts) == texts
    assert render(PLAIN_TEMPLATE, "Q: ", ["x"]) == ["Q: x"]


def test_plain_refuses_a_conversation() -> None:
    with pytest.raises(TemplateError, match="prompt 0 renders to nothing"):
        render(PLAIN_TEMPLATE, "", [[{"role": "user", "content": "hi"}]])


def test_the_system_text_comes_first_unless_there_is_one() -> None:
    text = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert render(text, "ours", ["hi", own, []]) == [
        "system=ours;user=hi;",
        "system=own;user=hi;",
        "system=ours;",
    ]
    assert own[0]["content"] == "own"
    assert len(own) == 2


def test_prompts_do_not_see_each_other() -> None:
    text = "{{ messages | length }}{{ x }}{% set x = prompt %}"
    assert render(text, "s", ["a", "b", "c"]) == ["2", "2", "2"]


def test_a_template_can_refuse_a_prompt() -> None:
    error = fails(
        "{% if prompt == 'b' %}{{ raise_exception('no b') }}{% endif %}{{ prompt }}", "a", "b"
    )
    assert error.reason == "failed"
    assert error.detail == "prompt 1: TemplateError: no b"


@pytest.mark.parametrize("name", ["strftime_now", "lipsum", "now", "self_", "get_env"])
def test_nothing_that_varies_is_there(name: str) -> None:
    assert render(f"{{{{ {name} is defined }}}}", "", ["x"]) == ["False"]


def test_there_is_no_random_filter() -> None:
    assert fails("{{ [1, 2] | random }}").reason == "syntax"


# -- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason", "says"),
    [
        ("{% if %}", "syntax", "line 1: Expected an expression"),
        ("a\n{{ b", "syntax", "line 2: unexpected end of template"),
        ("{% include 'other' %}", "failed", "prompt 0: TypeError: no loader"),
        ("{% extends '/etc/passwd' %}", "failed", "prompt 0: TypeError: no loader"),
        ("{{ 1 / 0 }}", "failed", "prompt 0: ZeroDivisionError: division by zero"),
        ("{{ 'a' + 1 }}", "failed", "prompt 0: TypeError: "),
        ("{{ messages[0].content.x.y }}", "failed", "prompt 0: UndefinedError: "),
        ("{{ '%d' % 'x' }}", "failed", "prompt 0: TypeError: "),
        ("{{ 'x' | int / 0 }}", "failed", "prompt 0: ZeroDivisionError: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed", "prompt 0: RecursionError"),
        ("{{ prompt.encode('no such codec') }}", "failed", "prompt 0: LookupError: "),
        ("{{ '' }}", "empty", "prompt 0 renders to nothing"),
        ("{% for i in range(500) %}xyz{% endfor %}", "size", "prompt 0: more than 1000 characters"),
        ("{{ 'x' * 1001 }}", "size", "prompt 0: more than 1000 characters"),
        ("(" * 5000, "", ""),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "syntax", "does not compile: "),
    ],
    ids=range(16),
)
def test_faults_are_named(text: str, reason: str, says: str) -> None:
    if not reason:
        assert render(text, "", ["x"], 5000) == [text]
        return
    error = fails(text)
    assert error.reason == reason
    assert error.detail.startswith(says)


def test_a_result_of_exactly_the_limit_is_allowed() -> None:
    assert render("{{ 'x' * 1000 }}", "", ["x"], 1000) == ["x" * 1000]


# -- attempts to get out -------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ ''|attr('\\x5f_class__') }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__code__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('id') }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ loop.__class__ }}{% for x in [1] %}{{ loop.__class__ }}{% endfor %}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ('{0.__class__}' | attr('format'))(1) }}",
    "{{ [('{0.__class__}').format] | map('call') | list }}",
    "{{ [messages] | map(attribute='__class__') | list }}",
    "{{ [messages] | groupby('__class__') }}",
    "{{ messages | selectattr('__class__') | list }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].clear() }}",
    "{% set ns = namespace(__html__=range) %}{{ ns }}",
    "{% set ns = namespace() %}{% set ns.__html__ = range %}{{ ns }}",
    "{{ namespace({'__class__': 1}) }}",
    "{% set ns = namespace(x=1) %}{{ ns._Namespace__attrs }}",
    "{{ (1).__class__.__base__ }}",
    "{% set f = prompt.format %}{{ f.__self__ }}",
    "{{ range(10**9) | list }}",
    "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{{ m.__func__ }}{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% set g = messages | map('string') %}{{ g.gi_frame }}{{ g.gi_code }}{{ g.__next__ }}",
    "{{ (messages | map('string')).gi_frame.f_builtins }}",
    "{{ '' | attr(['__cla', 'ss__'] | join) }}",
    "{{ messages[0] | attr('__class__') }}{{ (messages | first)['__class__'] }}",
    "{{ messages | map('attr', '__class__') | list }}",
    "{{ '%s' | format(prompt.__class__) }}{{ prompt.upper.__self__.__class__ }}",
    "{{ namespace.__class__ }}{{ range.__class__ }}{{ joiner().__init__.__globals__ }}",
    "{{ cycler('a').next.__func__.__globals__ }}",
    "{% set x = 'a'.format %}{{ [x] | map('__call__') | list }}",
    "{{ config }}{{ request }}{{ environment }}{{ context }}{{ get_flashed_messages }}",
    "{{ prompt.encode().__class__ }}{{ prompt.translate({}).__class__ }}",
    "{% filter attr('__class__') %}x{% endfilter %}",
    "{% for k in messages[0].__iter__ %}{{ k }}{% endfor %}",
    "{{ raise_exception('x'.__class__) }}",
    "{% trans %}{{ prompt.__class__ }}{% endtrans %}",
    "{% do messages.append(1) %}",
    "{% debug %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ open('/etc/passwd') }}",
    "{{ __import__('os') }}",
    "{{ eval('1') }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_escapes_are_refused(text: str) -> None:
    """Refused by an error, or rendered with the forbidden thing undefined: never with it shown."""
    result = outcome(text)
    for inside in ("class", "function", "module", "method", "0x", "root:", "uid="):
        assert inside not in result.replace("__class__", "")


def outcome(text: str) -> str:
    try:
        return render(text, "", ["x"], 10_000)[0]
    except TemplateError as error:
        assert error.reason in ("failed", "empty", "syntax")  # noqa: PT017 - an error is one good outcome
        return ""


def test_without_a_sandbox_they_would_show_it() -> None:
    from jinja2 import Environment

    assert "class" in Environment().from_string(ESCAPES[0]).render()
