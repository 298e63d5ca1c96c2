"""Loss masks of chats: the structural check of every kind of template with every kind of chat.

STOKER_TEMPLATES=FOLDER also checks every *.jinja there, and prints the results.
"""

import os
import re
from pathlib import Path

import pytest
from template_chats import (
    ASK,
    KINDS,
    PLACE,
    SAY,
    TOOLS,
    Kind,
    calls,
    document,
    result,
    says,
    user,
)
from template_check import NEVER_PRINTED, SPECIAL, TemplateCheck, renderings, tokenizer_of
from template_kinds import BOT, CHATML, SAID, SHIPPED, STRUCTURES, template, variant

from utils.prepare.chat_masks import ChatMasks
from utils.prepare.chat_templates import ChatTemplate
from utils.prepare.rows import ChatDocument
from utils.prepare.tokenizer import attach_template, end_of_turn_id
from utils.prepare.values import UnusableRowError

COLLECTION = {
    path.stem: path.read_text()
    for path in sorted(Path(os.environ.get("STOKER_TEMPLATES", os.devnull)).glob("*.jinja"))
}
# Kinds of chats that can be trained on with nearly every template.
TRAINED = {"one turn", "two turns", "three turns", "blanks", "unicode", "one letter", "weight 0"}
# Structures of templates that print some chats without an end, or change their text.
REFUSED = {
    "EOS behind the last turn alone": "no special token ends it",
    "no special token at all": "no special token ends it",
    "no end behind calls": "no special token ends it",
    # This template prints two calls as two turns.
    "an end for each kind of turn": "no special token ends it",
    "upper case": "changes the text: it prints 'UONE UTWO\\?' for 'Uone utwo\\?'",
}
REASONS = (
    "leaves out its (reasoning|content|tool calls)|refuses this conversation .(one call|roles must)"
)


def checked(template):
    """Return the outcomes with two EOS tokens: the template's own, and one it never prints."""
    return [TemplateCheck(template, end).run() for end in ("", NEVER_PRINTED)]


@pytest.mark.parametrize("name", [*STRUCTURES, *SHIPPED])
def test_no_chat_trains_the_wrong_text(name):
    outcomes = checked((STRUCTURES | SHIPPED)[name])
    assert [outcome.wrong for outcome in outcomes] == [[], []]
    if name in STRUCTURES:
        reasons = "|".join(filter(None, (REASONS, REFUSED.get(name))))
        others = [x for o in outcomes for x in o.refused.values() if not re.search(reasons, x)]
        assert name == "upper case" or not others
        assert name in REFUSED or not any(TRAINED & outcome.refused.keys() for outcome in outcomes)
    else:
        assert not TRAINED & outcomes[0].refused.keys()


CALL = '{"name": "look_up", "arguments": {"keyc": 7351}}'
HARMONY = " to=functions.look_up<|channel|>commentary json<|message|>"
FINAL = "<|channel|>final<|message|>"
GLM_CALL = (
    "\n<think></think>\n<tool_call>look_up\n<arg_key>keyc</arg_key>\n<arg_value>7351</arg_value>"
    "\n</tool_call><|observation|>"
)
ONE, OTHER = "Xone, xtwo.", "Xthree\nxfour!"
# fmt: off
EXACT = [  # (template, kind of chat, trained text of each turn)
    ("special tokens as quotes", "call last, string",
     ['<|tool_call>call:look_up{keya:<|"|>Vala valb<|"|>}<tool_call|><|tool_response>']),
    ("an end for each kind of turn", "call last, number", [HARMONY + '{"keyc": 7351}<|call|>']),
    ("an end for each kind of turn", "call last, none", [HARMONY + "{}<|call|>"]),
    ("an end for each kind of turn", "one turn", [FINAL + ONE + "<|return|>"]),
    ("header always printed", "one turn", [f"<|RESPONSE|>{ONE}<|RESPONSE_END|><|TURN_END|>"]),
    ("header always printed, default system", "call last, number",
     [f"<|ACTION|>[\n{CALL}]<|ACTION_END|><|TURN_END|>"]),
    ("thought opened where the header is always printed", "one turn",
     [f"<|RESPONSE|>{ONE}<|RESPONSE_END|><|TURN_END|>"]),
    ("header ends with another blank", "one turn", [f"\n{ONE}<|eot|>"]),
    ("header behind another blank", "one turn", [ONE + "<|eot|>"]),
    ("header between other blanks", "one turn", [ONE + "<|eot|>"]),
    ("no header", "call, number", [f"[TOOL_CALLS] [{CALL}]</s>", f" {ONE}</s>"]),
    ("end of calls", "call last, number", [CALL + "<|eom|>"]),
    ("needs tools", "call last, number", [f"<tool_call>\n{CALL}</tool_call><|im_end|>"]),
    ("the next header ends a turn", "call last, number",
     ["<tool_call>look_up<k>keyc</k>\n<v>7351</v></tool_call><|observation|>"]),
    ("special tokens in answers", "one turn",
     [f"<|open|>response<|sep|>{ONE}<|close|>response<|sep|><|close|>assistant<|sep|><|end|>"]),
    ("thought opened by the prompt", "thinking tags",
     ["Tone ttwo.\n</think>\n\nXone xtwo.<|im_end|>"]),
    ("thought closed in the history", "one turn", [f"</think>{ONE}<|im_end|>"]),
    ("values as Python", "call last, nested",
     ["[look_up(keyd={'keye': [True, 86.25, 'Vale']}, keyf=\"Valf\", keyg=False)]<|im_end|>"]),
    ("other blanks before the last end", "call last, number", [CALL + "<|im_end|>"]),
    # no token ends a turn, so the first token of the next message does
    ("glm4moe", "call, number", [GLM_CALL, f"\n<think></think>\n{ONE}<|user|>"]),
    # different tokens end the last turn and earlier turns; channels; the function in the header
    ("gptoss", "two turns", [f"{FINAL}{ONE}<|end|>", f"{FINAL}{OTHER}<|return|>"]),
    ("gptoss", "call, number", [HARMONY + '{"keyc": 7351}<|call|>', f"{FINAL}{ONE}<|return|>"]),
    # arguments go in as strings; contents as lists of parts
    ("llama3_1", "call, number",
     ['{"name": "look_up", "parameters": {"keyc": 7351}}<|eot_id|>', ONE + "<|eot_id|>"]),
    ("smolvlm", "two turns", [f" {ONE}<end_of_utterance>", f" {OTHER}<end_of_utterance>"]),
    # the template prints a thought in the last answer, even an empty one
    ("qwen3", "two turns", [ONE + "<|im_end|>", f"<think>\n\n</think>\n\n{OTHER}<|im_end|>"]),
    # templates of 2026, or others with their structure
    ("thoughts as parts", "thought", ["[THINK]Tone ttwo.[/THINK]Xone.</s>"]),
    ("thought opened by the prompt, the next header ends a turn", "thought",
     ["Tone ttwo.</think>Xone.<|user|>"]),
    ("role between tokens", "call last, number",
     [f"<tool_call>\n{CALL}\n</tool_call><|end_of_text|>"]),
    ("gemma4_v5", "call last, number",
     ["<|tool_call>call:look_up{keyc:7351}<tool_call|><|tool_response>"]),
    ("qwen3_5_think", "thought", ["Tone ttwo.\n</think>\n\nXone.<|im_end|>"]),
    ("qwen3_5_think", "user last", [ONE + "<|im_end|>"]),
    ("qwen3_instruct_2507", "empty thought", ["Xone.<|im_end|>"]),
    ("gptoss", "thought",
     [f"<|channel|>analysis<|message|>Tone ttwo.<|end|><|start|>assistant{FINAL}Xone.<|return|>"]),
    ("nemotron_3_nano", "thought", ["Tone ttwo.\n</think>\nXone.<|im_end|>"]),
    ("markers around a thought", "thought",
     ["<think>Tone ttwo.</think>Xone.<|im_end|>\n"]),
]
# fmt: on


@pytest.mark.parametrize(("name", "kind", "said"), EXACT)
def test_the_text_that_is_trained_on(name, kind, said):
    for end in ("", NEVER_PRINTED):
        check = TemplateCheck((STRUCTURES | SHIPPED)[name], end)
        found = check.masks(document(KINDS[kind], KINDS[kind].tools))
        trained = [found.text[slice(*span)] for span in found.spans]
        assert trained == [text.replace("</s>", check.eos) for text in said]


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


def test_a_prompt_with_words_that_no_chat_has_is_refused_with_both():
    chat = template("{{ m.content }}\n\n", "{{ m.content }}<|end|>", prompt="Remember the unit.")
    pattern = r"opens it with '\\n\\n'.*is '\\n\\nRemember the unit"
    with pytest.raises(UnusableRowError, match=pattern):
        masks_of(chat)(document(KINDS["one turn"], False))


def test_calls_that_are_printed_with_their_ids_in_place_of_names():
    call = "<call>{{ t.id }}<args>{{ c.arguments | tojson }}</call>"
    masks = masks_of(variant(CHATML, call=call))
    for given, shown in (({}, "{}"), ({"days": 3}, '{"days": 3}')):
        turn = calls(given)
        with pytest.raises(UnusableRowError, match=r"'look_up' of its calls .*functions.NAME:0"):
            masks(document(Kind([ASK, turn]), True))
        turn["tool_calls"][0]["id"] = "functions.look_up:0"
        found = masks(document(Kind([ASK, turn]), True))
        printed = f"<call>functions.look_up:0<args>{shown}</call>"
        assert said(found) == [f"<tool_call>\n{printed}</tool_call><|im_end|>"]


def test_a_template_that_needs_tools_is_taken_at_the_start():
    attach_template(tokenizer_of(STRUCTURES["needs tools"]), None)


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


def test_a_variable_that_prints_the_thoughts_is_named():
    masks = masks_of(STRUCTURES["thinking is off by default"])
    with pytest.raises(UnusableRowError, match=r'chat_template_kwargs: \{"thinking": true\}'):
        masked(masks, [ASK, says("Xone.", reasoning_content="Tone.")])
    masks = masks_of(PLAIN)
    with pytest.raises(UnusableRowError, match="leaves out its reasoning") as error:
        masked(masks, [ASK, says("Xone.", reasoning_content="Tone.")])
    assert "chat_template_kwargs" not in str(error.value)


def test_a_template_without_system_messages_is_refused_with_what_to_do():
    """As Gemma 2's, which says "System role not supported"."""
    check = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    masks = masks_of(check + PLAIN)
    with pytest.raises(UnusableRowError, match=r"no system.*into the first user message"):
        masked(masks, [{"role": "system", "content": "Help."}, ASK, SAY])
    alternate = masks_of(STRUCTURES["roles must alternate"])
    with pytest.raises(UnusableRowError, match=r"must alternate\)$"):
        masked(alternate, [{"role": "system", "content": "Help."}, ASK, ASK, SAY])


def test_words_that_are_printed_behind_the_result_of_their_call_are_refused():
    """Gemma 4 prints a call, the result of the call, and then the words of the same message."""
    printed = "{{ m.tool_calls[0].function.arguments }}{{ messages[loop.index].content }}"
    reply = BOT + f"{{% if m.tool_calls %}}{printed}{{% endif %}}{SAID}<|im_end|>\n"
    masks = masks_of(variant(CHATML, reply=reply, call="", tool=""))
    with pytest.raises(UnusableRowError, match="another message in the middle of it") as error:
        masked(masks, [ASK, calls({"keya": "Vala"}, content="Xone."), result("Res."), SAY], TOOLS)
    assert error.value.reason == "mask_too_wide"


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


@pytest.fixture
def rendered(monkeypatch):
    """Return a list that grows by one for each rendering of a chat."""
    found, variables = [], ChatTemplate._variables_of
    monkeypatch.setattr(
        ChatTemplate, "_variables_of", lambda *more: found.append(1) or variables(*more)
    )
    return found


def test_numbers_and_names_of_calls_add_no_work(rendered):
    """Chats that differ only in the numbers and names of calls cost two renderings each."""
    masks = masks_of(STRUCTURES["no header"])
    rendered.clear()
    for number in range(100, 120):
        turn = calls({"days": number})
        turn["tool_calls"][0]["id"] = f"callid{number}"
        masks(document(Kind([ASK, turn, result("Res.")]), True))
    assert len(rendered) < 2 * 20 + 20


def test_a_long_chat_costs_two_renderings_and_its_kinds_of_turns(rendered):
    """With two more renderings for every turn, the time would grow quadratically with the turns."""
    masks = masks_of(SHIPPED["gemma"])
    rendered.clear()
    turns = [turn for i in range(200) for turn in (user(f"q{i}"), says(f"answer {i}" * 3))]
    assert said(masked(masks, turns))[7] == "answer 7" * 3 + "<end_of_turn>"
    assert len(rendered) < 30
    rendered.clear()
    masked(masks, turns)
    assert len(rendered) == 2


def test_a_collection_trains_no_wrong_text(capsys):
    if not COLLECTION:
        pytest.skip("STOKER_TEMPLATES names no folder with templates")
    outcomes = {name: checked(text) for name, text in COLLECTION.items() if renderings(text)}
    trained = sum(outcome.trained for found in outcomes.values() for outcome in found)
    refused = [x for found in outcomes.values() for one in found for x in one.refused.values()]
    with capsys.disabled():
        print(f"\n{len(outcomes)} templates, {trained} chats trained, {len(refused)} refused")
    assert {name: found for name, found in outcomes.items() if any(o.wrong for o in found)} == {}
