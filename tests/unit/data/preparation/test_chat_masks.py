"""Loss masks are the assistant's words and what ends them, in 15 kinds of chats."""

import re
from functools import cache
from pathlib import Path

import chat_samples as samples
import numpy as np
import pytest
import trl

from utils.data.prepare.chat_masks import ChatMasks
from utils.data.prepare.documents import ChatDocument
from utils.data.prepare.rows import UnusableRowError
from utils.data.prepare.tokenization import token_mask

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
    masked = samples.masked(masks, chat, samples.TOOLS if kind in samples.CALLS else None)
    encoded = tokenizer(masked.text, add_special_tokens=False, return_offsets_mapping=True)
    ids, mask = (
        np.array(encoded["input_ids"]),
        token_mask(masked, np.array(encoded["offset_mapping"])),
    )
    assert tokenizer.decode(ids) == masked.text
    said = samples.said(masked)
    assert tokenizer.decode(ids[mask]) == "".join(said)
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
    except UnusableRowError as refused:
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
    prompt = template.render(ChatDocument(question, samples.PLACE), generation_prompt=True)
    given = masked.text[: masked.spans[0][0]]
    assert prompt.startswith(given)
    assert not GLUE.sub("", samples.SPECIAL.sub("", prompt.removeprefix(given)))


# No header, no generation prompt, calls as a list: TRL ships no template of this kind.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + "
    "' [/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}{{ ']' + eos_token }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content + eos_token }}{% else %}{{ '[RESULT]' + m.content }}{% endif %}"
    "{% endfor %}{{ tools | tojson if tools else '' }}"
)
DERIVED = {path.stem: path.read_text() for path in ORIGINALS} | {"mistral": MISTRAL}
PARIS = '{"city": "Paris", "days": 3}'
GLM_CALL = (
    "\n<think></think>\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>"
    "\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call><|observation|>"
)
FINAL = "<|channel|>final<|message|>"
CALL = f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS}<|call|>"
MISTRAL_CALL = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]</s>'
LLAMA_CALL = f'{{"name": "get_weather", "parameters": {PARIS}}}<|eot_id|>'
THOUGHT = "<think>\n\n</think>\n\n"
HELLO, YES = "Hello, friend.", "Yes,\nmore."
END = "<end_of_utterance>"
# What is trained on, with what is particular to a family.
EXPECTED = [
    ("mistral", "call", [MISTRAL_CALL, "Sun.</s>"]),
    # no token ends a turn: the next message's does
    ("glm4moe", "call", [GLM_CALL, "\n<think></think>\nSun.<|user|>"]),
    # one token ends the chat and another a turn within; channels; the function in the header
    ("gptoss", "two turns", [f"{FINAL}{HELLO}<|end|>", f"{FINAL}{YES}<|return|>"]),
    ("gptoss", "call", [CALL, f"{FINAL}Sun.<|return|>"]),
    # arguments go in as strings; contents as lists of parts
    ("llama3_1", "call", [LLAMA_CALL, "Sun.<|eot_id|>"]),
    ("smolvlm", "two turns", [f" {HELLO}{END}", f" {YES}{END}"]),
    # the last answer prints a thought, though it is empty
    ("qwen3", "two turns", [f"{HELLO}<|im_end|>", f"{THOUGHT}{YES}<|im_end|>"]),
]


@pytest.mark.parametrize(("family", "kind", "turns"), EXPECTED)
def test_each_familys_own_way_is_delimited(family, kind, turns):
    assert said_in(DERIVED[family], kind)[1] == turns


def test_an_empty_thought_that_the_prompt_prints_is_not_trained_on():
    masks, chat = prepared(DERIVED["qwen3"])[1], samples.KINDS["one turn"]
    given = samples.masked(masks, chat, None, {"enable_thinking": False})
    assert samples.said(given) == ["Nothing much.<|im_end|>"]
    assert samples.said(samples.masked(masks, chat))[0].startswith("<think>")


def test_thinking_that_is_dropped_by_design_is_told_and_in_the_last_turn_is_refused():
    masks = prepared(DERIVED["deepseek_r1_distill"])[1]
    thinks = samples.says("<think>\nI add.\n</think>\n\nIt is 4.")
    earlier = [samples.user("2+2?"), thinks, samples.user("Sure?"), samples.says("Yes.")]
    masked = samples.masked(masks, earlier)
    assert masked.drops_thinking
    assert "I add." not in masked.text
    assert not samples.masked(masks, samples.KINDS["one turn"]).drops_thinking
    with pytest.raises(UnusableRowError, match=r"message 1 \(assistant\): .* leaves out its reas"):
        samples.masked(masks, earlier[:2])


def test_what_a_template_leaves_out_is_refused():
    template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for kind, what in ("call", "tool calls"), ("reasoning", "reasoning"), ("system", "content"):
        with pytest.raises(
            UnusableRowError, match=rf"message \d .* leaves out its {what}"
        ) as error:
            said_in(template, kind)
        assert error.value.reason == f"{what.replace(' ', '_')}_left_out"
    masks = prepared(template)[1]
    with pytest.raises(UnusableRowError, match="leaves out the tool 'get_weather'"):
        samples.masked(masks, samples.KINDS["one turn"], samples.TOOLS)


def test_a_template_that_prints_a_turn_as_two_is_refused():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
        "<|Bot|>{{ m.reasoning_content }}</s><|Bot|>{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Bot|>{% endif %}"
    )
    with pytest.raises(UnusableRowError, match="prints it as two turns"):
        said_in(template, "reasoning")


def test_text_of_a_private_use_plane_is_trained_on_unless_marks_are_of_it():
    masks = ChatMasks(samples.byte_tokenizer(CHATML.read_text()))
    masked = samples.masked(masks, [samples.user("\U000f0001"), samples.says("\U000f0002")])
    assert samples.said(masked) == ["\U000f0002<|im_end|>"]
    with pytest.raises(UnusableRowError, match="private-use plane 16"):
        samples.masked(masks, [samples.user("q"), samples.says("\U00100003")])


def test_a_turn_of_blanks_alone_is_delimited_like_others():
    chat = [samples.user("q"), samples.says("\n"), samples.user("r"), samples.says("x")]
    for family in ("gptoss", "muse_glimmer", "deepseekv3"):
        blank, words = samples.said(samples.masked(prepared(DERIVED[family])[1], chat))
        assert blank.startswith(words.partition("x")[0] + "\n")
        assert samples.SPECIAL.search(blank.partition("\n")[2])


def test_a_long_chat_costs_two_renderings_and_its_kinds_of_turns(monkeypatch):
    """Not two more for every turn, which made a chat of 100 turns quadratic."""
    masks = ChatMasks(samples.byte_tokenizer(DERIVED["gemma"]))
    rendered = []
    given = masks.template._given
    monkeypatch.setattr(masks.template, "_given", lambda *a: rendered.append(1) or given(*a))
    turns = [
        m for i in range(200) for m in (samples.user(f"q{i}"), samples.says(f"answer {i}" * 3))
    ]
    assert samples.said(samples.masked(masks, turns))[7] == "answer 7" * 3 + "<end_of_turn>"
    assert len(rendered) < 30
    rendered.clear()
    samples.masked(masks, turns)
    assert len(rendered) == 2
