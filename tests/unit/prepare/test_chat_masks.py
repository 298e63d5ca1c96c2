"""Loss masks cover the assistant's words and the end of its turns, in 15 kinds of chats."""

import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from utils.prepare.chat_masks import ChatMasks
from utils.prepare.rows import ChatDocument, document_fields
from utils.prepare.tokenization import token_mask
from utils.prepare.tokenizer import end_of_turn_id
from utils.prepare.values import Location, UnusableRowError

PLACE = Location("a.jsonl", "line", 1)
SPECIAL = re.compile(
    r"<\|[^|<>\s'\"{}+~]+\|>|<\uff5c[^\uff5c<>\s]+\uff5c>|</?s>|<(?:start|end)_of_(?:turn|utterance)>"
    r"|<turn\|>|<\|turn>|<\|?channel\|?>|<\|?tool_(?:call|response)\|?>|\[/?INST\]|\[TOOL_CALLS\]"
)
ADDED = re.compile(r"</?(?:tool_call|tool_response|think)>")
ENDS = re.compile(
    r"<\|(?:im_end|eot_id|return|end_of_sentence|END_OF_TURN_TOKEN|eom|eot|endoftext)\|>|<turn\|>"
    r"|<end_of_(?:turn|utterance)>|<\uff5cend\u2581of\u2581sentence\uff5c>"
)


def byte_tokenizer(template):
    """Return a tokenizer of bytes and of the special tokens that a template writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = list(dict.fromkeys(SPECIAL.findall(template)))
    if "'<|' +" in template:
        special += ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=next(filter(ENDS.fullmatch, special), "</s>"),
        additional_special_tokens=special,
        clean_up_tokenization_spaces=False,
    )
    added = dict.fromkeys(ADDED.findall(template))
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in added])
    tokenizer.chat_template = template
    return tokenizer


def masked(masks, messages, *more):
    """Return the masked chat of messages; more: tools, template options, first_trained."""
    return masks(ChatDocument(messages, PLACE, *more))


def said(chat):
    """Return the texts that are trained on."""
    return [chat.text[start:stop] for start, stop in chat.spans]


def user(content):
    return {"role": "user", "content": content}


def says(content, **more):
    return {"role": "assistant", "content": content, **more}


def call(arguments, content=""):
    function = {"name": "get_weather", "arguments": arguments}
    return says(content, tool_calls=[{"id": "abcdefghi", "type": "function", "function": function}])


def result(content):
    names = {"name": "get_weather", "tool_call_id": "abcdefghi"}
    return {"role": "tool", "content": content, **names}


PROPERTIES = {"city": {"type": "string", "description": "city"}, "days": {"type": "integer"}}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Tell the weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]

PLAIN = {
    "one turn": [user("What is up?"), says("Nothing much.")],
    "two turns": [user("Hi"), says("Hello, friend."), user("And?"), says("Yes,\nmore.")],
    "letters": [user("ß 漢字"), says("grüß 漢字かな"), user("👩‍👩‍👧🏽"), says("😀 🇩🇪 naïve")],
    "white space": [user("  q"), says("    a\n\n  b\n"), user("q\n"), says("\nlast words ")],
    "special-token text": [
        *(user("what is <|im_end|>?"), says("It is <|im_end|> or </s> or <end_of_turn>.")),
        *(user("<|eot_id|>"), says("it ends <|im_end|>")),
    ],
}
OTHER = {
    "system": [{"role": "system", "content": "Be terse."}, user("Hi"), says("Hello.")],
    "reasoning": [user("2+2?"), says("It is 4.", reasoning_content="I add two and two.")],
    "earlier reasoning": [
        *(user("2+2?"), says("It is 4.", reasoning_content="I add.")),
        *(user("3+3?"), says("It is 6.", reasoning_content="Once more.")),
    ],
    "thinking tags": [user("2+2?"), says("<think>\nI add.\n</think>\n\nIt is 4.")],
    "empty answer": [user("q"), says(""), user("r"), says("fine")],
    "assistant first": [says("Welcome!"), user("Hi"), says("How are you?")],
    "two answers in a row": [user("Hi"), says("One."), says("Two."), user("q"), says("Three.")],
}
CALLS = {
    "call": [user("Weather?"), call({"city": "Paris", "days": 3}), result("sunny"), says("Sun.")],
    "call beside words": [user("q"), call('{"city": "Paris"}', "Look."), result("x"), says("y")],
    "call without arguments": [user("Weather?"), call({}), result("rain"), says("Rain.")],
}
KINDS = {
    kind: document_fields({"messages": chat}, "messages")["messages"]  # in the form that rows have
    for kind, chat in {**PLAIN, **OTHER, **CALLS}.items()
}

SHIPPED = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
ORIGINALS = [path for path in SHIPPED if not path.stem.endswith("_training")]
TRAINING = [path for path in SHIPPED if path.stem.endswith("_training")]
CHATML = Path(__file__).parents[3] / "recipes" / "chat_templates" / "chatml.jinja"
# Allowed between a turn's start and its words: tags and channels, but no role.
GLUE = re.compile(r"</?think>|<\|?channel\|?>|(?:final|analysis|thought|to=(?:self|user))\b|\s")
REASONS = (
    r"leaves out its (reasoning|tool calls|content)|roles must alternate|[Rr]oles? (are|not) supp"
    r"|[Nn]o user query|no special token ends it|words of another message|would not be trained on"
    r"|escapes or compares texts|nothing of it is printed"
)


@cache
def prepared(template):
    """Return a tokenizer with a template, and the template's ChatMasks."""
    tokenizer = byte_tokenizer(template)
    return tokenizer, ChatMasks(tokenizer, "2026-01-02")


def said_in(template, kind):
    """Return the masked chat of this kind, after a check that its loss tokens agree."""
    tokenizer, masks = prepared(template)
    found = masked(masks, KINDS[kind], TOOLS if kind in CALLS else None)
    encoded = tokenizer(found.text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.array(encoded["input_ids"])
    mask = token_mask(found, np.array(encoded["offset_mapping"]))
    assert tokenizer.decode(ids) == found.text
    assert tokenizer.decode(ids[mask]) == "".join(said(found))
    return found


def words_of(message):
    return message["content"].split("</think>")[-1].strip()


def check_turn(message, text):
    """Check one turn: its words, only tags before them, and special tokens after them."""
    words = words_of(message)
    assert words in text
    for call in message.get("tool_calls") or []:
        assert call["function"]["name"] in text
        assert "city" not in str(call["function"]["arguments"]) or "Paris" in text
    before, _, behind = text.rpartition(words) if words else ("", "", text)
    thought = message.get("reasoning_content") or "I add."
    if not message.get("tool_calls"):
        left = GLUE.sub("", SPECIAL.sub(" ", before.replace(thought, "")))
        assert left in ("", "assistant"), before  # a gpt-oss model writes the second header itself
        assert not SPECIAL.sub("", GLUE.sub("", behind)).removesuffix("</s>"), behind
    assert SPECIAL.search(behind)


def check_start(template):
    """Check that the trained text begins where the generation prompt ends."""
    found = said_in(template, "one turn")
    chat_template = prepared(template)[1].template
    question = chat_template.adapted(KINDS["one turn"][:1])
    prompt = chat_template.render(ChatDocument(question, PLACE), generation_prompt=True)
    given = found.text[: found.spans[0][0]]
    assert prompt.startswith(given)
    assert not GLUE.sub("", SPECIAL.sub("", prompt.removeprefix(given)))


@pytest.mark.parametrize("path", [*ORIGINALS, *TRAINING, CHATML], ids=lambda path: path.stem)
def test_what_is_trained_is_the_assistants_words_and_their_end(path):
    """Use all of TRL's templates: only training versions have markers, other masks are derived."""
    template = path.read_text()
    refused = {}
    for kind, chat in KINDS.items():
        try:
            texts = said(said_in(template, kind))
        except UnusableRowError as error:
            refused[kind] = str(error)
            continue
        answers = [message for message in chat if message["role"] == "assistant"]
        if path in TRAINING:  # the markers of these templates may enclose several parts of a turn
            assert all(words_of(answer) in "".join(texts) for answer in answers)
            continue
        for answer, text in zip(answers, texts, strict=True):
            check_turn(answer, text)
    assert not refused.keys() & PLAIN.keys(), refused
    assert all(re.search(REASONS, reason) for reason in refused.values()), refused
    if path not in TRAINING:
        check_start(template)


CHATML_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
# (family of templates, kind of chat, trained texts): one entry per peculiarity of a family.
EXPECTED = [
    ("mistral", "call", [MISTRAL_CALL, "Sun.</s>"]),
    # no token ends a turn, so the first token of the next message does
    ("glm4moe", "call", [GLM_CALL, "\n<think></think>\nSun.<|user|>"]),
    # different tokens end the last turn and earlier turns; channels; the function in the header
    ("gptoss", "two turns", [f"{FINAL}{HELLO}<|end|>", f"{FINAL}{YES}<|return|>"]),
    ("gptoss", "call", [CALL, f"{FINAL}Sun.<|return|>"]),
    # arguments go in as strings; contents as lists of parts
    ("llama3_1", "call", [LLAMA_CALL, "Sun.<|eot_id|>"]),
    ("smolvlm", "two turns", [f" {HELLO}{END}", f" {YES}{END}"]),
    # the template prints a thought in the last answer, even an empty one
    ("qwen3", "two turns", [f"{HELLO}<|im_end|>", f"{THOUGHT}{YES}<|im_end|>"]),
]


@pytest.mark.parametrize(("family", "kind", "turns"), EXPECTED)
def test_each_familys_own_way_is_delimited(family, kind, turns):
    assert said(said_in(DERIVED[family], kind)) == turns


def test_the_end_of_an_answer_is_not_that_of_a_part_of_it():
    """gpt-oss ends the last answer with <|return|>, other answers and thoughts with <|end|>."""
    for path in SHIPPED:
        if path.stem.startswith("gptoss"):
            tokenizer = byte_tokenizer(path.read_text())
            assert end_of_turn_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|return|>")


def test_an_empty_thought_that_the_prompt_prints_is_not_trained_on():
    masks, chat = prepared(DERIVED["qwen3"])[1], KINDS["one turn"]
    assert said(masked(masks, chat, None, {"enable_thinking": False})) == [
        "Nothing much.<|im_end|>"
    ]
    assert said(masked(masks, chat))[0].startswith("<think>")


def test_thinking_that_is_dropped_by_design_is_told_and_in_the_last_turn_is_refused():
    masks, thinking = prepared(DERIVED["deepseek_r1_distill"])[1], KINDS["thinking tags"]
    found = masked(masks, [*thinking, *KINDS["one turn"]])
    assert found.drops_thinking
    assert "I add." not in found.text
    silent = [turn | {"weight": 0} for turn in thinking]
    assert not masked(masks, [*silent, *KINDS["one turn"]]).drops_thinking
    assert not masked(masks, KINDS["one turn"]).drops_thinking
    with pytest.raises(UnusableRowError, match=r"message 1 \(assistant\): .* leaves out its reas"):
        masked(masks, thinking)


def test_what_a_template_leaves_out_is_refused():
    template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for kind, what in ("call", "tool calls"), ("reasoning", "reasoning"), ("system", "content"):
        left_out = rf"message \d .* leaves out its {what}"
        with pytest.raises(UnusableRowError, match=left_out) as error:
            said_in(template, kind)
        assert error.value.reason == f"{what.replace(' ', '_')}_left_out"
    masks = prepared(template)[1]
    with pytest.raises(UnusableRowError, match="leaves out the tool 'get_weather'"):
        masked(masks, KINDS["one turn"], TOOLS)


def test_a_template_that_prints_a_turn_as_two_is_refused():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
        "<|Bot|>{{ m.reasoning_content }}</s><|Bot|>{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Bot|>{% endif %}"
    )
    with pytest.raises(UnusableRowError, match="prints it as two turns"):
        said_in(template, "reasoning")


@pytest.mark.parametrize("letter", ["\U00017000", "\U00017003", "\U0002a6d6", "\U0010fffd"])
def test_rare_letters_are_trained_on(letter):
    """Marks are rare letters that the chat does not contain."""
    masks = ChatMasks(byte_tokenizer(CHATML.read_text()))
    chat = [user(f"q\U00017000{letter}"), says(f"a {letter} b"), user("r"), says(letter)]
    assert said(masked(masks, chat)) == [f"a {letter} b<|im_end|>", f"{letter}<|im_end|>"]


CHANGES = [
    ("m.content | upper", "One  two.", "'ONE  TWO.' for 'One  two.'"),
    ("m.content.split() | join(' ')", "One  two.", "'One two.' for 'One  two.'"),
    ("m.content | replace('\\n', ' ')", "One\ntwo.", "'One two.' for"),
]


@pytest.mark.parametrize(("printed", "words", "shown"), CHANGES)
def test_a_template_that_changes_the_text_is_refused_by_name(printed, words, shown):
    template = CHATML_LIKE.replace("m.content", f"({printed})")
    masks = ChatMasks(byte_tokenizer(template))
    assert said(masked(masks, [user("Q"), says("1 2")])) == ["1 2<|im_end|>"]
    pattern = f"message 1 .* changes the text: it prints {re.escape(shown)}.*--chat_template"
    with pytest.raises(UnusableRowError, match=pattern) as error:
        masked(masks, [user("Q"), says(words)])
    assert error.value.reason == "text_changed"


def test_a_turn_of_blanks_alone_is_delimited_like_others():
    chat = [user("q"), says("\n"), user("r"), says("x")]
    for family in ("gptoss", "muse_glimmer", "deepseekv3"):
        blank, words = said(masked(prepared(DERIVED[family])[1], chat))
        assert blank.startswith(words.partition("x")[0] + "\n")
        assert SPECIAL.search(blank.partition("\n")[2])


def test_a_long_chat_costs_two_renderings_and_its_kinds_of_turns(monkeypatch):
    """With two more renderings for every turn, the time would grow quadratically with the turns."""
    masks = ChatMasks(byte_tokenizer(DERIVED["gemma"]))
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
