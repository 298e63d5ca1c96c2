"""Chats of 15 kinds, and tokenizers that know the special tokens of a template."""

import re

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from utils.data.prepare.chat_masks import ChatMasks, MaskedChat
from utils.data.prepare.documents import ChatDocument
from utils.data.prepare.records import Location
from utils.data.prepare.rows import document_fields

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


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
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


def masked(masks: ChatMasks, messages, *more) -> MaskedChat:
    """Return what is trained on of messages; more: tools, template options, first_trained."""
    return masks(ChatDocument(messages, PLACE, *more))


def said(chat: MaskedChat) -> list[str]:
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
        user("what is <|im_end|>?"),
        says("It is <|im_end|> or </s> or <end_of_turn>."),
        user("<|eot_id|>"),
        says("it ends <|im_end|>"),
    ],
}
OTHER = {
    "system": [{"role": "system", "content": "Be terse."}, user("Hi"), says("Hello.")],
    "reasoning": [user("2+2?"), says("It is 4.", reasoning_content="I add two and two.")],
    "earlier reasoning": [
        user("2+2?"),
        says("It is 4.", reasoning_content="I add."),
        user("3+3?"),
        says("It is 6.", reasoning_content="Once more."),
    ],
    "thinking tags": [user("2+2?"), says("<think>\nI add.\n</think>\n\nIt is 4.")],
    "empty answer": [user("q"), says(""), user("r"), says("fine")],
    "assistant first": [says("Welcome!"), user("Hi"), says("How are you?")],
    "two answers in a row": [user("Hi"), says("One."), says("Two."), user("q"), says("Three.")],
}
CALLS = {
    "call": [user("Weather?"), call({"city": "Paris", "days": 3}), result("sunny"), says("Sun.")],
    "call beside words": [
        *(user("q"), call('{"city": "Paris"}', "Let me look."), result("x"), says("y")),
    ],
    "call without arguments": [user("Weather?"), call({}), result("rain"), says("Rain.")],
}
KINDS = {
    kind: document_fields({"messages": chat}, "messages")["messages"]  # as rows give them
    for kind, chat in {**PLAIN, **OTHER, **CALLS}.items()
}
