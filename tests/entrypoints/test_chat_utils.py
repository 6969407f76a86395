# SPDX-License-Identifier: Apache-2.0
"""Chat templates render in a sandbox, and whatever is wrong is a VLLMValidationError."""

import copy

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers.utils.chat_template_utils import render_jinja_template

from vllmx.entrypoints.chat_utils import detect_content_format, parse_messages, render_chat
from vllmx.exceptions import VLLMValidationError
from vllmx.model_loader.tokenizer import Tokenizer

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{% set text = message.content | trim %}
{{ '<start_of_turn>' + message.role + '\\n' + text + '<end_of_turn>\\n' }}{% endfor %}"""
LISTS = """{% for m in messages %}{{ m.role }}:{% for part in m['content'] %}[{{ part.text }}]\
{% endfor %}{% endfor %}"""
USER = [{"role": "user", "content": "hi"}]


def tokenizer(template=None, **templates) -> Tokenizer:
    if template is not None:
        templates["default"] = template
    backend = Backend(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens_map=special, chat_templates=templates)


def render(template, messages=USER, **options) -> str:
    return render_chat(tokenizer(template), messages, **options)


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, GEMMA, LISTS])
def test_text_equals_transformers(template, prompt) -> None:
    messages = [
        {"role": "user", "content": "  <b>\u65e5\u672c & caf\u00e9  "},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "again"},
    ]
    parsed = parse_messages(messages, detect_content_format(template))
    expected, _ = render_jinja_template(
        [parsed],
        chat_template=template,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(template, messages, add_generation_prompt=prompt) == expected[0]


def test_input_is_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = copy.deepcopy(messages)
    options = {"continue_final_message": True, "add_generation_prompt": False}
    render(LISTS, messages, **options)
    render(CHATML, messages, **options)
    assert messages == before


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([], ""),
        (None, ""),
    ],
)
def test_parts_are_joined_for_a_string_template(role, content, text) -> None:
    assert parse_messages([{"role": role, "content": content}], "string") == [
        {"role": role, "content": text}
    ]


def test_parts_stay_a_list_for_a_list_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]
    assert render(LISTS, messages) == "user:[a][b]assistant:[c]"
    assert parse_messages([{"role": "tool", "content": parts}], "openai") == [
        {"role": "tool", "content": "a\nb"}
    ]


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (CHATML, "string"),
        (GEMMA, "string"),
        (LISTS, "openai"),
        (
            "{% for m in a %}{% set c = m.content %}{% for p in c %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% macro r(content) %}{% for p in content %}{% endfor %}{% endmacro %}", "openai"),
        ("{% for m in messages %}{% for t in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% broken", "string"),
    ],
)
def test_content_format_is_detected(template, kind) -> None:
    assert detect_content_format(template) == kind


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "text"}],
        [{"type": "text", "text": None}],
        [{"text": "a"}],
        [{"type": "image_url", "image_url": {"url": "data:,"}}],
        [{"type": "surprise"}],
        [7],
        {"type": "text", "text": "a"},
        7,
    ],
)
def test_part_that_is_not_text_is_refused(content) -> None:
    with pytest.raises(VLLMValidationError) as caught:
        render(CHATML, [{"role": "user", "content": content}])
    assert caught.value.parameter == "messages"


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "hi"}], [{"role": 1}]])
def test_malformed_messages_are_refused(messages) -> None:
    with pytest.raises(VLLMValidationError):
        render(CHATML, messages)


def test_arguments_of_tool_calls_become_objects() -> None:
    def call(arguments):
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return parse_messages([{"role": "assistant", "tool_calls": calls}], "string")[0]

    assert call('{"x": 1}')["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert call("")["tool_calls"][0]["function"]["arguments"] == {}
    assert call({"x": 1})["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    with pytest.raises(VLLMValidationError, match="arguments is not JSON"):
        call("{x")
    empty = parse_messages([{"role": "assistant", "content": "a", "tool_calls": []}], "string")
    assert "tool_calls" not in empty[0]


def test_tools_reach_the_template_and_pick_the_tool_template() -> None:
    tools = [{"type": "function", "function": {"name": "caf\u00e9<x>"}}]
    own = tokenizer("{{ tools | tojson }}")
    assert render_chat(own, USER, tools=tools) == (
        '[{"type": "function", "function": {"name": "caf\u00e9<x>"}}]'
    )
    named = tokenizer("plain", tool_use="with tools")
    assert render_chat(named, USER, tools=tools) == "with tools"
    assert render_chat(named, USER, tools=[]) == "plain"


def test_developer_joins_the_system_message_where_the_template_knows_none() -> None:
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "developer", "content": "c"},
    ]
    assert render("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}", messages) == (
        "system=a\n\nc;user=b;"
    )
    knows = "{# developer #}{% for m in messages %}{{ m.role }};{% endfor %}"
    assert render(knows, messages) == "system;user;developer;"


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (
            CHATML,
            "answer so far",
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nanswer so far",
        ),
        (CHATML, " end ", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n end "),
        (
            GEMMA,
            "  so far ",
            "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>assistant\nso far",
        ),
        ("{{ messages[-1].content.split('</think>')[-1] }}!", "<think>a</think>b", "b"),
        ("{{ messages[0].content }}|{{ messages[-1].content }}!", "hi", "hi|hi"),
        (
            "{% for m in messages %}{% for p in m.content %}{{ p.text }}/{% endfor %}{% endfor %}",
            "x",
            "hi/x",
        ),
    ],
)
def test_continuing_the_final_message_stops_right_after_it(template, content, expected) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert render(template, messages, **options) == expected


@pytest.mark.parametrize(
    ("template", "content", "problem"),
    [
        ("{{ messages[0].content }}", "b", "drops the end of the final message"),
        (CHATML, None, "no text to continue"),
        (CHATML, "", "no text to continue"),
    ],
)
def test_what_cannot_be_continued_is_refused(template, content, problem) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    with pytest.raises(VLLMValidationError, match=problem):
        render(template, messages, continue_final_message=True, add_generation_prompt=False)


def test_continuing_and_a_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(VLLMValidationError, match="Cannot set both `continue_final_message`"):
        render(CHATML, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (GEMMA, [{"role": "system", "content": "x"}], "System role not supported"),
        (GEMMA, USER * 2, "roles must alternate"),
        ("{{ nothing | tojson }}", USER, "not JSON serializable"),
        ("{{ 1 / 0 }}", USER, "division by zero"),
        ("{% if %}", USER, "template failed"),
        ("{{ messages.append(1) }}", USER, "template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", USER, "template failed"),
        ("{{ messages[9].content }}", USER, "template failed"),
    ],
)
def test_template_s_error_is_the_request_s(template, messages, problem) -> None:
    with pytest.raises(VLLMValidationError, match=problem):
        render(template, messages)


def test_chat_without_a_template_says_what_to_pass() -> None:
    with pytest.raises(VLLMValidationError, match=r"no chat template.*--chat-template"):
        render_chat(tokenizer(), USER)
    assert render_chat(tokenizer(), USER, chat_template="given") == "given"


def test_template_variables() -> None:
    assert render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render("{{ thinking }}", template_kwargs={"thinking": False}) == "False"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    with pytest.raises(VLLMValidationError, match="must not set messages"):
        render("x", template_kwargs={"messages": []})


def test_tags_that_templates_use_are_known() -> None:
    assert render("{% generation %}a{% endgeneration %}b") == "ab"
    assert (
        render("{% for i in [1, 2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "1"
    )
    assert render("{% if true %}\n  x\n{% endif %}\n") == "  x\n"
    assert render("{{ [1, '\u00e9'] | tojson(indent=1) }}") == '[\n 1,\n "\u00e9"\n]'
