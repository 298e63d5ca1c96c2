"""Loss masks are the assistant's words and what ends them, in 19 kinds of chats."""

import re
from functools import cache
from pathlib import Path

import chat_samples as samples
import pytest
import trl

from utils.data.prepare.chat_masks import ChatMasks
from utils.data.prepare.chat_templates import Chat, ChatRefused
from utils.data.prepare.tokenization import tokenize

SHIPPED = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
ORIGINALS = [path for path in SHIPPED if not path.stem.endswith("_training")]
TRAINING = [path for path in SHIPPED if path.stem.endswith("_training")]
CHATML = Path(__file__).parents[4] / "recipes" / "chat_templates" / "chatml.jinja"
# What may stand between a turn's start and its words: tags, channels, nothing that is a role.
GLUE = re.compile(r"</?think>|<\|?channel\|?>|(?:final|analysis|thought|to=(?:self|user))\b|\s")
REASONS = (
    r"leaves out its (reasoning|tool calls|content)|roles must alternate|[Rr]oles? (are|not) supp"
    r"|[Nn]o user query|no special token ends it|words of another message|would not be trained on"
    r"|prints other text where marks"
)


@cache
def prepared(template):
    """Return the tokenizer and the masks of a template."""
    tokenizer = samples.byte_tokenizer(template)
    return tokenizer, ChatMasks(tokenizer, "2026-01-02")


def said_in(template, kind):
    """Return the assistant's messages, the text trained on of each by its tokens, and all."""
    chat = samples.KINDS[kind]
    tokenizer, masks = prepared(template)
    masked = masks(chat, samples.TOOLS if kind in samples.CALLS else None)
    ((ids, mask),) = tokenize(tokenizer, [masked])
    assert tokenizer.decode(ids) == masked.text
    said = [masked.text[start:stop] for start, stop in masked.spans]
    assert tokenizer.decode(ids[mask.astype(bool)]) == "".join(said)
    return [m for m in chat if m["role"] == "assistant"], said, masked


def words_of(message):
    return message["content"].split("</think>")[-1].strip()


def check_turn(message, said):
    """Check one turn: its words, before them nothing but glue, behind them special tokens."""
    words = words_of(message)
    assert words in said
    for call in message.get("tool_calls") or []:
        assert call["function"]["name"] in said
        assert "city" not in str(call["function"]["arguments"]) or "Paris" in said
    before, _, behind = said.rpartition(words) if words else ("", "", said)
    thought = message.get("reasoning_content") or "I add."
    if not message.get("tool_calls"):
        left = GLUE.sub("", samples.SPECIAL.sub(" ", before.replace(thought, "")))
        assert left in ("", "assistant"), before  # gpt-oss says its second header itself
        assert not samples.SPECIAL.sub("", GLUE.sub("", behind)).removesuffix("</s>"), behind
    assert samples.SPECIAL.search(behind)


def refusal_of(template, kind):
    try:
        said_in(template, kind)
    except ChatRefused as refused:
        return str(refused)
    return ""


@pytest.mark.parametrize("path", [*ORIGINALS, *TRAINING, CHATML], ids=lambda path: path.stem)
def test_what_is_trained_is_the_assistants_words_and_their_end(path):
    """Every template that TRL ships: originals are derived, training versions say it themselves."""
    template = path.read_text()
    refused = {kind: reason for kind in samples.KINDS if (reason := refusal_of(template, kind))}
    assert not refused.keys() & samples.PLAIN.keys(), refused
    assert all(re.search(REASONS, reason) for reason in refused.values()), refused
    for kind in samples.KINDS.keys() - refused.keys():
        messages, said, _ = said_in(template, kind)
        if path in TRAINING:  # their markers may stand around several parts of a turn
            assert all(words_of(message) in "".join(said) for message in messages)
            continue
        for message, text in zip(messages, said, strict=True):
            check_turn(message, text)


@pytest.mark.parametrize("path", ORIGINALS, ids=lambda path: path.stem)
def test_a_turn_starts_where_generation_does(path):
    masked = said_in(path.read_text(), "one turn")[2]
    template = prepared(path.read_text())[1].template
    question = template.adapted(samples.KINDS["one turn"][:1])
    prompt = template.render(Chat(question), generation_prompt=True)
    given = masked.text[: masked.spans[0][0]]
    assert prompt.startswith(given)
    assert not GLUE.sub("", samples.SPECIAL.sub("", prompt.removeprefix(given)))


# Short templates of our own, each with what is particular to a published family.
END_OF_USER = "{{ '[INST] ' + m.content + ' [/INST]' }}"
FAMILIES = {
    # no header, no generation prompt, calls as a list
    "mistral": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}" + END_OF_USER + "{% elif "
        "m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{ c.function | tojson }}"
        "{% endfor %}{{ ']' + eos_token }}{% elif m.role == 'assistant' %}{{ ' ' + m.content + "
        "eos_token }}{% else %}{{ '[RESULT]' + m.content }}{% endif %}{% endfor %}"
        "{{ tools | tojson if tools else '' }}",
        [" Hello, friend.</s>", " Yes,\nmore.</s>"],
        ['[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]</s>'],
    ),
    # no token ends a turn: the next message's does
    "glm": (
        "[gMASK]{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'user' "
        "%}<|user|>\n{{ m.content }}{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}"
        "{% else %}<|assistant|>\n{{ m.content }}{% for c in m.tool_calls or [] %}\n<tool_call>"
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}\n{{ k }}={{ v }}"
        "{% endfor %}\n</tool_call>{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ["\nHello, friend.<|user|>", "\nYes,\nmore.<|user|>"],
        ["\n<tool_call>get_weathercity=Parisdays=3</tool_call><|observation|>"],
    ),
    # one token ends the chat and another a turn within; channels; the function in the header
    "gpt-oss": (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'user' %}"
        "<|start|>user<|message|>{{ m.content }}<|end|>{% elif m.role == 'tool' %}<|start|>"
        "functions.{{ m.name }} to=assistant<|message|>{{ m.content }}<|end|>{% elif m.tool_calls "
        "%}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|start|>assistant"
        "<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        [
            "<|channel|>final<|message|>Hello, friend.<|end|>",
            "<|channel|>final<|message|>Yes,\nmore.<|return|>",
        ],
        [' to=functions.get_weather<|message|>{"city": "Paris", "days": 3}<|call|>'],
    ),
    # arguments go in as strings, several tokens close a call
    "deepseek": (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '<|User|>' + m.content }}{% elif m.role == 'tool' %}<|out|>{{ m.content }}{% elif "
        "m.tool_calls %}<|Assistant|><|begin|>{{ m.tool_calls[0].function.name + '\n' + "
        "m.tool_calls[0].function.arguments }}<|close|><|end|><|end_of_sentence|>{% else %}"
        "{{ '<|Assistant|>' + m.content }}<|end_of_sentence|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
        ["Hello, friend.<|end_of_sentence|>", "Yes,\nmore.<|end_of_sentence|>"],
        ['<|begin|>get_weather\n{"city": "Paris", "days": 3}<|close|><|end|><|end_of_sentence|>'],
    ),
    # the text ends with one more token when nothing is asked for
    "phi": (
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + "
        "m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}{{ '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}"
        "{% endif %}<|endoftext|>{# <|end|> <|user|> <|assistant|> <|tool|> #}",
        ["Hello, friend.<|end|>", "Yes,\nmore.<|end|>"],
        None,
    ),
    # contents are printed when they are lists of parts
    "smolvlm": (
        "{% for m in messages %}<|im_start|>{{ m.role | capitalize }}: {% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<end_of_utterance>\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}",
        [" Hello, friend.<end_of_utterance>", " Yes,\nmore.<end_of_utterance>"],
        None,
    ),
    # a model's role of another name, texts are trimmed
    "gemma": (
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' "
        "else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ["Hello, friend.<end_of_turn>", "Yes,\nmore.<end_of_turn>"],
        None,
    ),
    # the words themselves have tokens around them
    "command": (
        "{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>"
        "{{ m.content }}{% else %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ m.content }}"
        "<|END_RESPONSE|>{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}"
        "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
        [
            "<|START_RESPONSE|>Hello, friend.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
            "<|START_RESPONSE|>Yes,\nmore.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        ],
        None,
    ),
    # the last answer prints a thought, though it is empty; the prompt opens it or not
    "qwen": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.role == "
        "'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
        "{% endif %}{% endif %}",
        ["Hello, friend.<|im_end|>", "<think>\n\n</think>\n\nYes,\nmore.<|im_end|>"],
        None,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_familys_own_way_is_delimited(family):
    template, turns, calls = FAMILIES[family]
    assert said_in(template, "two turns")[1] == turns
    if calls:
        assert said_in(template, "call")[1][:1] == calls


def test_an_empty_thought_that_the_prompt_prints_is_not_trained_on():
    masks = prepared(FAMILIES["qwen"][0])[1]
    chat = samples.KINDS["one turn"]
    (span,) = masks(chat, options={"enable_thinking": False}).spans
    masked = masks(chat)
    assert masked.text[slice(*span)] == "Nothing much.<|im_end|>"
    assert masked.text[slice(*masked.spans[0])].startswith("<think>")


def test_thinking_that_is_dropped_by_design_is_told_and_in_the_last_turn_is_refused():
    template = FAMILIES["qwen"][0]
    masks = ChatMasks(samples.byte_tokenizer(template))
    thinks = samples.says("<think>\nI add.\n</think>\n\nIt is 4.")
    earlier = [samples.user("2+2?"), thinks, samples.user("Sure?"), samples.says("Yes.")]
    masked = masks(earlier)
    assert masked.drops_thinking
    assert "I add." not in masked.text
    assert not masks(samples.KINDS["one turn"]).drops_thinking
    with pytest.raises(ChatRefused, match=r"message 1 \(assistant\): .* leaves out its reasoning"):
        masks(earlier[:2])


@pytest.mark.parametrize(
    ("kind", "what"),
    [("call", "tool calls"), ("reasoning", "reasoning"), ("system", "content")],
)
def test_what_a_template_leaves_out_is_refused(kind, what):
    template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ChatRefused, match=rf"message \d .* leaves out its {what}") as refused:
        said_in(template, kind)
    assert refused.value.reason == f"{what.replace(' ', '_')}_left_out"
    with pytest.raises(ChatRefused, match="leaves out the tool 'get_weather'"):
        ChatMasks(samples.byte_tokenizer(template))(samples.KINDS["one turn"], samples.TOOLS)


def test_a_template_that_prints_a_turn_as_two_is_refused():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
        "<|Bot|>{{ m.reasoning_content }}</s><|Bot|>{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Bot|>{% endif %}"
    )
    with pytest.raises(ChatRefused, match="prints it as two turns"):
        said_in(template, "reasoning")


def test_text_of_a_private_use_plane_is_trained_on_unless_marks_are_of_it():
    masks = ChatMasks(samples.byte_tokenizer(CHATML.read_text()))
    masked = masks([samples.user("\U000f0001"), samples.says("\U000f0002")])
    assert masked.text[slice(*masked.spans[0])] == "\U000f0002<|im_end|>"
    with pytest.raises(ChatRefused, match="private-use plane 16"):
        masks([samples.user("q"), samples.says("\U00100003")])


def test_a_turn_of_blanks_alone_is_delimited_like_others():
    chat = [samples.user("q"), samples.says("\n"), samples.user("r"), samples.says("x")]
    for family in ("gpt-oss", "command", "glm"):
        masked = prepared(FAMILIES[family][0])[1](chat)
        blank, words = (masked.text[slice(*span)] for span in masked.spans)
        assert blank.startswith(words.partition("x")[0] + "\n")
        assert samples.SPECIAL.search(blank.partition("\n")[2])


def test_a_long_chat_costs_two_renderings_and_its_kinds_of_turns(monkeypatch):
    """Not two more for every turn, which made a chat of 100 turns quadratic."""
    masks = ChatMasks(samples.byte_tokenizer(FAMILIES["gemma"][0]))
    rendered = []
    given = masks.template._given
    monkeypatch.setattr(masks.template, "_given", lambda *a: rendered.append(1) or given(*a))
    turns = [
        m for i in range(200) for m in (samples.user(f"q{i}"), samples.says(f"answer {i}" * 3))
    ]
    assert len(masks(turns).spans) == 200
    assert len(rendered) < 30
    rendered.clear()
    masks(turns)
    assert len(rendered) == 2
