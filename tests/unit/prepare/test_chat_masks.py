"""Loss masks of chats: thoughts, refused templates, rare letters, and the number of renderings."""

import re

import pytest
from template_chats import KINDS, PLACE, TOOLS, document, says, user
from template_check import SPECIAL, tokenizer_of
from template_kinds import CHATML, SHIPPED, template

from utils.prepare.chat_masks import ChatMasks
from utils.prepare.rows import ChatDocument
from utils.prepare.tokenizer import end_of_turn_id
from utils.prepare.values import UnusableRowError

PLAIN = template(**CHATML)
ONE = [user("Uone"), says("Xone.")]


def masks_of(text):
    return ChatMasks(tokenizer_of(text), "2026-01-02")


def masked(masks, messages, *more):
    """Return the masked chat of messages; more: tools, template options, first_trained."""
    return masks(ChatDocument(messages, PLACE, *more))


def said(chat):
    """Return the texts that are trained on."""
    return [chat.text[start:stop] for start, stop in chat.spans]


def test_the_end_of_an_answer_is_not_that_of_a_part_of_it():
    """gpt-oss ends the last answer with <|return|>, other answers and thoughts with <|end|>."""
    for name, text in SHIPPED.items():
        if name.startswith("gptoss"):
            tokenizer = tokenizer_of(text)
            assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|return|>")


def test_an_empty_thought_that_the_prompt_prints_is_not_trained_on():
    masks = masks_of(SHIPPED["qwen3"])
    assert said(masked(masks, ONE, None, {"enable_thinking": False})) == ["Xone.<|im_end|>"]
    assert said(masked(masks, ONE))[0].startswith("<think>")


def test_thinking_that_is_dropped_by_design_is_told_and_in_the_last_turn_is_refused():
    masks = masks_of(SHIPPED["deepseek_r1_distill"])
    thinking = [user("2+2?"), says("<think>\nI add.\n</think>\n\nIt is 4.")]
    found = masked(masks, [*thinking, *ONE])
    assert found.drops_thinking
    assert "I add." not in found.text
    silent = [turn | {"weight": 0} for turn in thinking]
    assert not masked(masks, [*silent, *ONE]).drops_thinking
    assert not masked(masks, ONE).drops_thinking
    with pytest.raises(UnusableRowError, match=r"message 1 \(assistant\): .* leaves out its reas"):
        masked(masks, thinking)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("call, number", "tool calls"), ("thought", "reasoning"), ("system", "content")],
)
def test_what_a_template_leaves_out_is_refused(kind, what):
    text = "{% set messages = messages | rejectattr('role', 'eq', 'system') | list %}" + template(
        CHATML["user"], CHATML["reply"], tool=CHATML["tool"], prompt=CHATML["prompt"]
    )
    with pytest.raises(UnusableRowError, match=rf"message \d .* leaves out its {what}") as error:
        masks_of(text)(document(KINDS[kind], KINDS[kind].tools))
    assert error.value.reason == f"{what.replace(' ', '_')}_left_out"


def test_tools_that_a_template_leaves_out_are_refused():
    with pytest.raises(UnusableRowError, match="leaves out the tool 'look_up'"):
        masked(masks_of(PLAIN.replace("tools | tojson", "''")), ONE, TOOLS)


def test_a_template_that_prints_a_turn_as_two_is_refused():
    reply = "<|Bot|>{{ m.reasoning_content }}</s><|Bot|>{{ m.content }}</s>"
    text = template("<|User|>{{ m.content }}", reply, prompt="<|Bot|>")
    with pytest.raises(UnusableRowError, match="prints it as two turns"):
        masks_of(text)(document(KINDS["thought"], False))


@pytest.mark.parametrize("letter", ["\U00017000", "\U00017003", "\U0002a6d6", "\U0010fffd"])
def test_rare_letters_are_trained_on(letter):
    """Marks are rare letters that the chat does not contain."""
    chat = [user(f"q\U00017000{letter}"), says(f"a {letter} b"), user("r"), says(letter)]
    found = said(masked(masks_of(PLAIN), chat))
    assert found == [f"a {letter} b<|im_end|>", f"{letter}<|im_end|>"]


CHANGES = [
    ("m.content | upper", "One  two.", "'ONE  TWO.' for 'One  two.'"),
    ("m.content.split() | join(' ')", "One  two.", "'One two.' for 'One  two.'"),
    ("m.content | replace('\\n', ' ')", "One\ntwo.", "'One two.' for"),
]


@pytest.mark.parametrize(("printed", "words", "shown"), CHANGES)
def test_a_template_that_changes_the_text_is_refused_by_name(printed, words, shown):
    masks = masks_of(PLAIN.replace("m.content", f"({printed})"))
    assert said(masked(masks, [user("Q"), says("1 2")])) == ["1 2<|im_end|>"]
    pattern = f"message 1 .* changes the text: it prints {re.escape(shown)}.*--chat_template"
    with pytest.raises(UnusableRowError, match=pattern) as error:
        masked(masks, [user("Q"), says(words)])
    assert error.value.reason == "text_changed"


@pytest.mark.parametrize("family", ["gptoss", "muse_glimmer", "deepseekv3"])
def test_a_turn_of_blanks_alone_is_delimited_like_others(family):
    chat = [user("q"), says("\n"), user("r"), says("x")]
    blank, words = said(masked(masks_of(SHIPPED[family]), chat))
    assert blank.startswith(words.partition("x")[0] + "\n")
    assert SPECIAL.search(blank.partition("\n")[2])


def test_a_long_chat_costs_two_renderings_and_its_kinds_of_turns(monkeypatch):
    """With two more renderings for every turn, the time would grow quadratically with the turns."""
    masks = masks_of(SHIPPED["gemma"])
    rendered = []
    variables = masks.template._variables_of
    monkeypatch.setattr(
        masks.template, "_variables_of", lambda *a: rendered.append(1) or variables(*a)
    )
    turns = [turn for i in range(200) for turn in (user(f"q{i}"), says(f"answer {i}" * 3))]
    assert said(masked(masks, turns))[7] == "answer 7" * 3 + "<end_of_turn>"
    assert len(rendered) < 30
    rendered.clear()
    masked(masks, turns)
    assert len(rendered) == 2
