"""Chat templates in the styles of known models, for tests; and readers of what they render."""

import functools

from varlen.text.chat_template import ChatTemplate, chat_template
from varlen.text.rendering import Choice, Rendered

LOSSES_ALLOWED = Choice(allow_unwritten=True)

LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{% set system = messages[0]['content'] + '\\n\\n' %}{% set loop_messages = messages[1:] %}
{% else %}{% set system = '' %}{% set loop_messages = messages %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{% set before = system if loop.last or loop.index0 == loop.length - 2 else '' %}
{{ '[INST] ' + before + message['content'] + ' [/INST]' }}
{%- else %}
{{ ' ' + message['content'] + eos_token }}
{%- endif %}
{% endfor %}"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{% endif %}"""

THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}
            {{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

TAGGED = """\
{% for message in messages %}
{% if message['role'] == 'assistant' %}
{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

BARE = """\
{% for message in messages %}
{{ '### ' + message['role'] | title + ': ' + message['content'] + '\\n' }}
{%- endfor %}"""

PROMPTED = """\
{% for message in messages %}
{{ message['role'] | upper + ': ' + message['content'] + ('</s>' if message['role'] == 'assistant' else ' ') }}
{%- endfor %}
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MARKS = (
    "<|eot_id|>",
    "<end_of_turn>",
    "<start_of_turn>",
    "<|start_header_id|>",
    "<|im_start|>",
    "<|im_end|>",
)
TEMPLATES = {
    "chatml": None,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "thinking": THINKING,
    "tagged": TAGGED,
    "bare": BARE,
    "prompted": PROMPTED,
}


@functools.cache
def template(name: str, *, knows_marks: bool = True) -> ChatTemplate:
    """Compile one of the templates, with its tokenizer's special tokens known or not."""
    marks = MARKS if knows_marks else ()
    return chat_template(TEMPLATES[name], special_tokens=SPECIAL, end_marks=marks)


def chat(*turns: str) -> list[dict[str, str]]:
    """Make messages of "u:hello", "a:hi" and the like."""
    roles = {"u": "user", "a": "assistant", "s": "system", "t": "tool", "d": "developer"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def said(rendered: Rendered) -> list[str]:
    return [rendered.text[start:stop] for start, stop in rendered.spans]


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"


TAIL = (
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


TAGGED = (
    HEAD
    + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    + "{% else %}{{ m.content }}{% endif %}"
    + TAIL
)
