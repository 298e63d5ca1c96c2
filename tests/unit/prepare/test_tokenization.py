"""Token ids and loss masks of texts, of prompts with completions, and of long documents."""

import operator
import random

import preparation_samples as samples
import pytest
from tokenizer_families import BEGIN, END, FAMILIES, tokenizer_of
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from utils.config.errors import ConfigurationError
from utils.data.token_dataset import open_token_dataset
from utils.prepare import encoding, tokenization
from utils.prepare.encoding import GigatokenEncoder, choose_backend, load_prompts
from utils.prepare.rows import ChatDocument, CompletionDocument, PiecesDocument, TextDocument
from utils.prepare.tokenization import DocumentTokenizer
from utils.prepare.units import content_digest
from utils.prepare.values import BadRow, Location

PLACE = Location("a.jsonl", "line", 1)
PIECES = ["yes", "x = [", "1, 2]", "return", " value", "\n", "\n\n", "  ", "naïve ß", "12", ":"]
GIGATOKEN = ("byte_level_cl100k", "metaspace_first", "metaspace_always", "prepend_normalizer")


def pairs(number=60):
    """Return random prompts and completions, and some that once failed."""
    choose = random.Random(1)
    found = [("Answer:\n", "yes"), ("x = [", "1, 2]"), ("Answer: ", "yes"), ("yes\n", "\nno")]
    found += [("", "yes")]
    while len(found) < number:
        pair = ["".join(choose.choices(PIECES, k=choose.randint(1, 4))) for _ in range(2)]
        if pair[1].strip():
            found.append(tuple(pair))
    return found


def letters(tokenizer, ids):
    """Return the decoded tokens without blanks and without WordPiece's marks (##)."""
    return "".join(tokenizer.decode(ids).replace("##", "").split())


def tokenized(tokenizer, rows):
    return DocumentTokenizer(tokenizer)([CompletionDocument(*row, PLACE) for row in rows])


def test_a_long_prompt_is_a_text_and_not_the_name_of_a_file():
    text = "word " * 100
    tokenizer = tokenizer_of("byte_level_cl100k")
    (prompt,) = load_prompts([text], tokenizer, chats=False, most_tokens=10**6)
    assert prompt.text == text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_and_its_completion_have_the_ids_of_the_joined_text(family):
    tokenizer, rows = tokenizer_of(family), pairs()
    exact = 0
    for (prompt, completion), found in zip(rows, tokenized(tokenizer, rows), strict=True):
        whole = tokenizer(prompt + completion)["input_ids"]
        assert found.ids.tolist() == [*whole, tokenizer.eos_token_id]
        mask = found.loss_mask.astype(bool)
        assert mask.tolist() == sorted(mask), "the end of the document is trained on"
        trained, words = letters(tokenizer, found.ids[mask][:-1]), "".join(completion.split())
        assert trained.endswith(words)
        if trained == words:
            exact += 1
            assert letters(tokenizer, found.ids[~mask][1:]) == "".join(prompt.split())
        else:
            assert found.notes["prompt_words_in_completions"] == 1
    assert exact > len(rows) * 0.8


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_tokenized_apart_and_ids_stay(family):
    """The ids are those of axolotl's InstructionPromptTokenizingStrategy (067b021)."""
    tokenizer = tokenizer_of(family)
    for prompt, answer in [pair for pair in pairs() if all(map(str.strip, pair))][:20]:
        asked = tokenizer(prompt)["input_ids"]
        said = tokenizer(answer, add_special_tokens=False)["input_ids"]
        pieces = [(prompt, False), (answer, True)]
        plain, full = DocumentTokenizer(tokenizer)(
            [PiecesDocument(pieces, PLACE), PiecesDocument(pieces, PLACE, special_tokens=True)]
        )
        begin = [each for each in asked[:1] if each == tokenizer.bos_token_id]
        assert full.ids.tolist()[-len(said) - 1 :] == [*said, tokenizer.eos_token_id]
        assert plain.ids.tolist() == [*asked[len(begin) :], *said]
        assert full.loss_tokens == plain.loss_tokens + 1 == len(said) + 1
    ids = [([5, 6], False), ([7], True)]
    alien, negative, first = [([5], False), ([10**7], True)], [([7, -3], True)], [([5], True)]
    kept, *refused = DocumentTokenizer(tokenizer)(
        [PiecesDocument(pieces, PLACE) for pieces in (ids, alien, negative, first)]
    )
    assert (kept.ids.tolist(), kept.loss_mask.tolist()) == ([5, 6, 7], [0, 0, 1])
    faults = ("token id 10000000: the", "token id -3: the", "nothing after the first")
    assert all(map(operator.contains, map(str, refused), faults))


@pytest.mark.parametrize("family", GIGATOKEN)
def test_gigatoken_gives_the_ids_of_the_tokenizer(family):
    tokenizer = tokenizer_of(family)
    choose = random.Random(2)
    joined = ["".join(choose.choices(PIECES, k=choose.randint(1, 40))) for _ in range(2000)]
    texts = [*samples.sentences(2000, seed=9), *joined, *LONG.values()]
    found = GigatokenEncoder(tokenizer)(texts)
    for text, ids, exact in zip(texts, found, encoding.encode(tokenizer, texts), strict=True):
        assert ids.tolist() == exact.tolist(), text


def test_a_tokenizer_without_offsets_finds_the_completion_by_the_ids_of_the_prompt():
    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    rows = [("Answer:\n", "yes"), ("漢", "字 ß"), ("", "no")]
    for (prompt, completion), found in zip(rows, tokenized(tokenizer, rows), strict=True):
        assert found.ids.tolist() == tokenizer(prompt + completion)["input_ids"]
        trained = found.ids[found.loss_mask == 1]
        assert tokenizer.decode(trained) == completion + tokenizer.eos_token


@pytest.mark.parametrize("template", ["$A", f"{BEGIN} $A", f"{BEGIN} $A {END}", f"$A {END}"])
def test_begin_and_end_are_added_once_and_those_in_a_text_stay(template, tmp_path):
    tokenizer = tokenizer_of("byte_level", template)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    own = [begin] if BEGIN in template else []
    plain = tokenizer("x y", add_special_tokens=False)["input_ids"]
    texts = {
        "x y": [*own, *plain, end],
        f"x y{END}": [*own, *plain, end],
        f"{BEGIN}x y": [begin, *plain, end],
        f"{BEGIN}x y{END}": [begin, *plain, end],
        f"x y{END}x y": [*own, *plain, end, *plain, end],
    }
    documents = [TextDocument(text, PLACE) for text in texts]
    found = DocumentTokenizer(tokenizer)(documents)
    assert [each.ids.tolist() for each in found] == list(texts.values())

    row = (f"{BEGIN}x y{END}", f"x y{END}")
    (pair,) = tokenized(tokenizer, [row])
    assert pair.ids.tolist() == [begin, *plain, end, *plain, end]
    assert pair.loss_mask.tolist() == [0] * (len(plain) + 2) + [1] * (len(plain) + 1)

    asked = {"x y": [*own, *plain], f"{BEGIN}x y{END}": [begin, *plain, end]}
    prompts = load_prompts(list(asked), tokenizer, chats=False, most_tokens=100)
    assert [prompt.token_ids for prompt in prompts] == list(asked.values())


def test_a_chat_has_only_the_special_tokens_that_its_template_prints():
    tokenizer = samples.chatml_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 2)]
    )
    chat = ChatDocument(samples.chat("q", "a")["messages"], PLACE)
    (found,) = DocumentTokenizer(tokenizer)([chat])
    assert found.ids.tolist().count(2) == 2


@pytest.mark.parametrize("text", [BEGIN, END, f"{BEGIN}{END}"])
def test_special_tokens_alone_are_no_document(text):
    tokenizer = tokenizer_of("byte_level")
    documents = [TextDocument(text, PLACE), CompletionDocument("x", text, PLACE)]
    for found in DocumentTokenizer(tokenizer)(documents):
        assert isinstance(found, BadRow)
        assert found.reason == "empty"


def test_what_a_tokenizer_has_no_token_for_is_counted():
    tokenizer = tokenizer_of("word_piece")
    (found,) = tokenized(tokenizer, [("the Ж", "value Ж Ж")])
    assert found.notes["unknown_tokens"] == 3


LONG = {
    "lines": "".join(samples.sentences(60, seed=5)),
    "paragraphs": "\n\n".join(text.strip() for text in samples.sentences(60, seed=6)),
    "one line": "return value list " * 80,
    "no blanks": "漢字ß" * 300,
    "blanks": "\n" * 500 + "a" + " " * 400 + "b",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_in_pieces_loses_nothing_and_has_the_ids_of_the_whole(family, monkeypatch):
    tokenizer = tokenizer_of(family)
    documents = [TextDocument(text, PLACE) for text in LONG.values()]
    whole = DocumentTokenizer(tokenizer)(documents)
    monkeypatch.setattr(tokenization, "LARGEST_PIECE_CHARACTERS", 150)
    monkeypatch.setattr(encoding, "CUTS_SEARCHED_CHARACTERS", 100)
    pieces = DocumentTokenizer(tokenizer)(documents)
    for name, one, other in zip(LONG, whole, pieces, strict=True):
        assert tokenizer.decode(other.ids) == tokenizer.decode(one.ids)
        if name in ("lines", "paragraphs", "one line"):
            assert other.ids.tolist() == one.ids.tolist()


def test_a_document_in_pieces_is_one_row_with_one_end_on_one_side(tmp_path, prepare, monkeypatch):
    """A long text gives the same document in the same split, as a row of a file and as a file."""
    monkeypatch.setattr(tokenization, "LARGEST_PIECE_CHARACTERS", 64)
    texts = [f"{number} naïve\n" * 40 for number in range(20)]
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "texts" / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    rows = samples.write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    plain, found = samples.tiny_tokenizer(), []
    for name, source in (("rows", rows), ("files", tmp_path / "texts")):
        out = prepare(name, sources=[source], validation_fraction=0.4)
        found.append({split: samples.rows(out / split) for split in ("train", "validation")})
    assert found[0] == found[1]
    assert len(found[0]["train"]) + len(found[0]["validation"]) == 20
    for split, documents in found[0].items():
        said = [plain.decode(ids[:-1]) for ids in documents]
        held_out = [content_digest(TextDocument(text, PLACE), 0) < 0.4 * 2**64 for text in said]
        assert set(held_out) == {split == "validation"}
        assert set(said) <= set(texts)
        assert all(ids.count(0) == 1 for ids in documents)


def test_a_cap_takes_the_beginning_of_a_text_that_is_longer(tmp_path, prepare):
    (tmp_path / "a.txt").write_text("the value of x\n" * 500, encoding="utf-8")
    out = prepare("out", sources=[{"path": str(tmp_path / "a.txt"), "max_tokens": 100}])
    (ids,) = samples.rows(out / "train")
    assert len(ids) == 100
    described = samples.description(out / "train")["preparation"]
    assert described["sources"]["capped"] == 1
    assert described["bytes_per_token"] < 5


@pytest.mark.parametrize(
    ("documents", "words", "warned"), [(2, 20_000, True), (60, 20, True), (60, 400, False)]
)
def test_a_small_held_out_split_is_named(tmp_path, prepare, caplog, documents, words, warned):
    texts = samples.text_source(tmp_path / "texts.jsonl")
    rows = [{"text": f"{number} " + "x " * words} for number in range(documents)]
    held_out = samples.write_jsonl(tmp_path / "held_out.jsonl", rows)
    out = prepare("out", sources=[texts], eval_sources=[f"test={held_out}"])
    assert len(open_token_dataset(out / "test")) == documents
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("test: a small held-out split (" in line for line in said) == warned
    assert not any("train:" in line for line in said)


def test_a_vocabulary_without_the_letter_a_is_no_obstacle():
    words = {"<unk>": 0, BEGIN: 1, END: 2, "value": 3, "of": 4}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(BEGIN, 1), (END, 2)]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=special
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)
    (found,) = DocumentTokenizer(made)([TextDocument("value of", PLACE)])
    assert found.ids.tolist() == [1, 3, 4, 2]


def words_only():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize(
    ("make", "document_format", "reason"),
    [
        (words_only, "text", "gigatoken cannot be used: Unsupported model type"),
        (samples.chatml_tokenizer, "messages", "loss masks need the offsets"),
    ],
)
def test_what_gigatoken_cannot_do_the_tokenizer_does(make, document_format, reason, caplog):
    caplog.set_level("INFO")
    assert choose_backend("auto", make(), document_format) == "tokenizers"
    with pytest.raises(ConfigurationError, match=f"{reason}.*--tokenizer_backend tokenizers"):
        choose_backend("gigatoken", make(), document_format)
    assert not caplog.messages, "a user can do nothing about it"


def test_a_gigatoken_with_other_ids_is_not_used(monkeypatch):
    right = GigatokenEncoder.__call__

    def wrong(self, texts):
        found = zip(texts, right(self, texts), strict=True)
        return [ids[:-1] if "漢" in text else ids for text, ids in found]

    monkeypatch.setattr(GigatokenEncoder, "__call__", wrong)
    assert choose_backend("auto", samples.tiny_tokenizer(), "text") == "tokenizers"
    with pytest.raises(ConfigurationError, match="other ids for the text '漢字"):
        choose_backend("gigatoken", samples.tiny_tokenizer(), "text")
