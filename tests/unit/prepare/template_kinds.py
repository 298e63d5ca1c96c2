"""Short chat templates with every structure of published templates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import trl

RECIPE = Path(__file__).parents[3] / "recipes" / "chat_templates" / "chatml.jinja"
TOOLS_PRINTED = "{% if tools %}{{ tools | tojson }}{% endif %}"


def template(
    user: str,
    reply: str,
    call: str = "",
    tool: str = "",
    prompt: str = "",
    start: str = "",
    end: str = "",
    system: str = "",
    calls: tuple[str, str, str] = ("", "", ""),
) -> str:
    """Return a template made from the text for each role.

    call: the text of one call; the template names the call `c`. calls: the text before, between and
    after the calls of a turn. start: the text at the start of a chat. prompt: the generation
    prompt. end: the text at the end of a chat without a generation prompt.
    """
    opening, between, closing = calls
    between = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    made = (
        f"{{% if m.tool_calls %}}{opening}{{% for t in m.tool_calls %}}{{% set c = t.function %}}"
        f"{call}{between}{{% endfor %}}{closing}{{% else %}}{reply}{{% endif %}}"
    )
    return (
        f"{start}{TOOLS_PRINTED}{{% for m in messages %}}"
        f"{{% if m.role == 'user' %}}{user}{{% elif m.role == 'system' %}}{system or user}"
        f"{{% elif m.role == 'tool' %}}{tool}{{% else %}}{made if call else reply}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% else %}}{end}{{% endif %}}"
    )


ARGUMENTS = "{{ c.arguments | tojson }}"
JSON_CALL = '{"name": "{{ c.name }}", "arguments": ' + ARGUMENTS + "}"
TAGGED = ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call><|im_end|>\n")
BOT = "<|im_start|>assistant\n"
IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
SAID = "{{ m.content }}"
CHATML = {
    "user": IM,
    "reply": IM,
    "call": JSON_CALL,
    "calls": (BOT + TAGGED[0], *TAGGED[1:]),
    "tool": IM,
    "prompt": BOT,
}
THOUGHT = "{{ m.reasoning_content if m.reasoning_content else '' }}"
PYTHONIC = (
    "{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
QUOTED = (
    "call:{{ c.name }}{% raw %}{{% endraw %}{% for k, v in c.arguments.items() %}{{ k }}:"
    '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}'
    "{% if not loop.last %},{% endif %}{% endfor %}}"
)
HARMONY_CALL = (
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
)
HARMONY_REPLY = (
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}"
)
TURN = "<|TURN|>"
COMMAND = {
    "user": TURN + "<|USER|>{{ m.content }}<|TURN_END|>",
    "reply": TURN + "<|BOT|><|RESPONSE|>{{ m.content }}<|RESPONSE_END|><|TURN_END|>",
    "call": JSON_CALL,
    "calls": (TURN + "<|BOT|><|ACTION|>[\n", ",\n", "\n]<|ACTION_END|><|TURN_END|>"),
    "tool": TURN + "<|SYSTEM|><results>{{ m.content }}</results><|TURN_END|>",
    "prompt": TURN + "<|BOT|>",
    "end": TURN + "<|BOT|>",
}
INST = {
    "user": "[INST] {{ m.content }} [/INST]",
    "reply": " {{ m.content }}{{ eos_token }}",
    "call": JSON_CALL,
    "calls": ("[TOOL_CALLS] [", ", ", "]{{ eos_token }}"),
    "tool": "[TOOL_RESULTS] {{ m.content }} [/TOOL_RESULTS]",
    "start": "{{ bos_token }}",
}
LLAMA_HEADER = "<|header|>assistant<|/header|>\n\n"
ONE_CALL = "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
HEADED = "<|header|>{{ m.role }}<|/header|>\n\n{{ m.content }}<|eot|>"
LLAMA = {
    "user": HEADED,
    "reply": HEADED,
    "call": JSON_CALL,
    "calls": (LLAMA_HEADER, "; ", "<|eom|>"),
    "tool": HEADED.replace("{{ m.role }}", "ipython"),
    "prompt": LLAMA_HEADER,
}
GLM = {
    "user": "<|user|>\n{{ m.content }}",
    "reply": "<|assistant|>\n" + SAID,
    "call": "<tool_call>{{ c.name }}{% for k, v in c.arguments.items() %}\n<k>{{ k }}</k>\n<v>"
    "{{ v if v is string else v | tojson }}</v>{% endfor %}\n</tool_call>",
    "calls": ("<|assistant|>\n", "\n", ""),
    "tool": "<|observation|>\n{{ m.content }}",
    "prompt": "<|assistant|>\n",
    "system": "<|system|>\n{{ m.content }}",
}
CONTENT_OR_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)
DEEPSEEK_PROMPT = "<\uff5cAssistant\uff5c>{{ '<think>' if thinking else '</think>' }}"
ROLE = "<|start_of_role|>{{ m.role }}<|end_of_role|>"
GRANITE_BOT = "<|start_of_role|>assistant<|end_of_role|>"
SPECIAL_CALL = "<|call|>{{ c.name }}<|sep|>{{ c.arguments | tojson }}<|/call|>"


def variant(base: Mapping[str, Any], **changes: Any) -> str:
    """Return the template of a family with other texts for some roles."""
    return template(**{**base, **changes})


STRUCTURES: Mapping[str, str] = {
    "chatml": template(**CHATML),
    "bos before": variant(CHATML, start="{{ bos_token }}"),
    "default system": variant(CHATML, start="<|im_start|>system\nHelp.<|im_end|>\n"),
    "no generation prompt": variant(CHATML, prompt=""),
    "a token closes the chat": variant(CHATML, end="<|endoftext|>"),
    "EOS of the tokenizer": template(
        "User: {{ m.content }}\n",
        "Assistant: {{ m.content }}{{ eos_token }}\n",
        prompt="Assistant:",
    ),
    "EOS behind the last turn alone": template(
        "User: {{ m.content }}\n",
        "Assistant: {{ m.content }}{% if loop.last %}{{ eos_token }}{% else %}\n{% endif %}",
        prompt="Assistant:",
    ),
    "no special token at all": template(
        "User: {{ m.content }}\n", "Assistant: {{ m.content }}\n", prompt="Assistant: "
    ),
    "special tokens as quotes": template(
        "<|turn>user\n{{ m.content }}<turn|>\n",
        "<|turn>model\n{{ m.content }}<turn|>\n",
        "<|tool_call>" + QUOTED + "<tool_call|>",
        'response:look_up{value:<|"|>{{ m.content }}<|"|>}<tool_response|>',
        "<|turn>model\n",
        calls=("<|turn>model\n", "", "<|tool_response>"),
    ),
    "an end for each kind of turn": template(
        "<|start|>user<|message|>{{ m.content }}<|end|>",
        HARMONY_REPLY,
        HARMONY_CALL,
        "<|start|>functions.look_up to=assistant<|message|>{{ m.content }}<|end|>",
        "<|start|>assistant",
    ),
    "header always printed": variant(COMMAND, start="{{ bos_token }}"),
    "header always printed, default system": variant(
        COMMAND, start="<s>" + TURN + "<|SYSTEM|>Help.<|TURN_END|>"
    ),
    "thought opened where the header is always printed": variant(
        COMMAND, prompt=TURN + "<|BOT|><|THINK|><|THINK_END|>"
    ),
    "no header": template(**INST),
    "tools behind the chat": template(**INST).replace(TOOLS_PRINTED, "") + TOOLS_PRINTED,
    "header ends with another blank": variant(LLAMA, prompt="<|header|>assistant<|/header|>\n"),
    "header behind another blank": variant(LLAMA, prompt="\n" + LLAMA_HEADER),
    "header between other blanks": variant(LLAMA, prompt="\n " + LLAMA_HEADER),
    "end of calls": template(**LLAMA),
    "one call alone": variant(LLAMA, calls=(LLAMA_HEADER + ONE_CALL, "", "<|eom|>")),
    "the next header ends a turn": template(**GLM),
    "special tokens in calls": variant(
        CHATML, call=SPECIAL_CALL, calls=(BOT + "<|calls|>", "", "<|/calls|><|im_end|>\n")
    ),
    "no end behind calls": variant(CHATML, call=SPECIAL_CALL, calls=(BOT, "", "")),
    "calls as Python": variant(CHATML, call=PYTHONIC, calls=(BOT + "[", ", ", "]<|im_end|>\n")),
    "values as Python": variant(
        CHATML,
        call=PYTHONIC.replace(
            "{{ v | tojson }}", '{% if v is string %}"{{ v }}"{% else %}{{ v }}{% endif %}'
        ),
        calls=(BOT + "[", ", ", "]<|im_end|>\n"),
    ),
    "other blanks before the last end": variant(
        CHATML, calls=(BOT, "\n", "{{ '' if loop.last else '\\n' }}<|im_end|>\n")
    ),
    "special tokens in answers": template(
        "<|open|>user<|sep|>{{ m.content }}<|close|>user<|sep|><|end|>",
        "<|open|>assistant<|sep|><|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
        "<|close|>assistant<|sep|><|end|>",
        prompt="<|open|>assistant<|sep|>",
    ),
    "thought opened by the prompt": variant(CHATML, prompt=BOT + "<think>\n"),
    "empty thought in the prompt": variant(CHATML, prompt=BOT + "<think>\n\n</think>\n\n"),
    "thought printed": variant(
        CHATML,
        reply=BOT + f"<think>\n{THOUGHT}\n</think>\n\n{SAID}<|im_end|>\n",
        prompt=BOT + "<think>\n",
    ),
    "thought closed in the history": variant(
        CHATML, reply=BOT + f"<think></think>{SAID}<|im_end|>\n", prompt=BOT + "<think>\n"
    ),
    "thoughts as parts": variant(INST, reply=CONTENT_OR_PARTS + "{{ eos_token }}"),
    "thinking is off by default": template(
        "<\uff5cUser\uff5c>{{ m.content }}",
        DEEPSEEK_PROMPT
        + f"{{% if thinking %}}{THOUGHT}</think>{{% endif %}}"
        + SAID
        + "<\uff5cend\u2581of\u2581sentence\uff5c>",
        prompt=DEEPSEEK_PROMPT,
    ),
    "thought opened by the prompt, the next header ends a turn": template(
        "<|user|>{{ m.content }}",
        f"<|assistant|><think>{THOUGHT}</think>{SAID}",
        prompt="<|assistant|><think>",
        system="<|system|>{{ m.content }}",
    ),
    "role between tokens": template(
        ROLE + "{{ m.content }}<|end_of_text|>\n",
        ROLE + "{{ m.content }}<|end_of_text|>\n",
        JSON_CALL,
        ROLE + "{{ m.content }}<|end_of_text|>\n",
        GRANITE_BOT,
        calls=(
            GRANITE_BOT + "<tool_call>\n",
            "\n</tool_call>\n<tool_call>\n",
            "{{ '\\n' }}</tool_call><|end_of_text|>\n",
        ),
    ),
    "markers around a thought": variant(
        CHATML,
        reply=BOT
        + "{% generation %}"
        + f"{{% if m.reasoning_content %}}<think>{THOUGHT}</think>{{% endif %}}{SAID}<|im_end|>\n"
        + "{% endgeneration %}",
        calls=(BOT + "{% generation %}", "; ", "<|im_end|>\n{% endgeneration %}"),
    ),
    "answer behind a tool without a header": template(
        "<|user|>{{ m.content }}<|user_end|>",
        "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}<|bot|>{% endif %}"
        "{{ m.content }}<|bot_end|>",
        "{{ c.name }}{{ c.arguments | tojson }}",
        "[{{ m.content }}]",
        "{% if messages[-1].role != 'tool' %}<|bot|>{% endif %}",
        calls=("<|bot|><|tools|>[", ", ", "]<|tools_end|>"),
    ),
    "needs tools": "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}"
    + template(**CHATML),
    "roles must alternate": "{% for m in messages %}{% if loop.index0 > 0 and "
    "m.role == messages[loop.index0 - 1].role %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% endfor %}" + template(**INST),
    "calls as JSON strings": variant(CHATML, call=JSON_CALL.replace(" | tojson", "")),
    "contents as parts": template(**CHATML).replace("{{ m.content }}", "{{ m.content[0].text }}"),
    "blanks stripped": template(**CHATML).replace("m.content }}", "m.content | trim }}"),
    "upper case": template(**CHATML).replace("m.content }}", "m.content | upper }}"),
    "markers": variant(
        CHATML,
        reply=BOT + "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n",
        calls=(
            BOT + "{% generation %}<tool_call>\n",
            TAGGED[1],
            "\n</tool_call><|im_end|>{% endgeneration %}\n",
        ),
    ),
    "words behind the end": variant(CHATML, end="Rate the answer."),
}
SHIPPED = {
    path.stem: path.read_text()
    for path in (*sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja")), RECIPE)
}
