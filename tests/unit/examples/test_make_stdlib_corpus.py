import json

import pytest

from examples import make_stdlib_corpus as corpus

SHUTIL = '''
def copy(source):
    """Copy the bytes of a file. And more.

    Second paragraph.
    """

def _private():
    "Copy the bytes of a secret file."

def short(): "Too short."
def signature(): "signature(function) -> an inspected one"
def undocumented(): return 1

class C:
    def method(self): "Do something with an object."
'''
GLOB = '''
def walk(path):
    """
    Yield the folders
    below a path.
    """

def link(): "Copy the folders of another path."
def short(): "A second function of this name."
'''


def test_facts_are_first_sentences_of_public_functions_with_one_answer():
    sources = [("glob.py", GLOB), ("shutil.py", SHUTIL), ("nobody.py", GLOB), ("a/uuid.py", GLOB)]
    facts = corpus.documented_functions(sources)
    assert facts == {
        ("shutil", "copy"): "Copy the bytes of a file",
        ("glob", "walk"): "Yield the folders below a path",
        ("glob", "link"): "Copy the folders of another path",
        ("glob", "short"): "A second function of this name",
    }
    # Another module has a function of this name, and another function this sentence.
    again = SHUTIL.replace("Too short", "Copy the folders of another path")
    facts = corpus.documented_functions([("glob.py", GLOB), ("shutil.py", again)])
    assert set(facts) == {("shutil", "copy"), ("glob", "walk")}


def test_each_fact_is_trained_on_and_asked_again_in_another_wording():
    facts = {("os", f"f{number}"): f"Answer {number}" for number in range(12)}
    chats = list(corpus.questions(facts))
    held_out = {question: answer for is_held_out, question, answer in chats if is_held_out}
    trained = {question: answer for is_held_out, question, answer in chats if not is_held_out}
    assert len(chats) == len(held_out) + len(trained) == 12 * len(corpus.WHAT + corpus.WHERE)
    assert held_out["What does os.f0 do?"] == "Answer 0"
    assert held_out["What is os.f1 for?"] == "Answer 1"
    assert trained["What does os.f1 do?"] == "Answer 1"
    assert held_out["Which module has the function f0?"] == "os"
    assert set(held_out.values()) == set(trained.values()) == {*facts.values(), "os"}
    # Each wording is trained on, with other facts.
    for wording in corpus.WHAT + corpus.WHERE:
        asked = {wording.format(module="os", function=function) for _, function in facts}
        assert 0 < len(asked & held_out.keys()) < len(asked & trained.keys())


@pytest.mark.exhaustive  # reads the standard library twice
def test_the_corpus_is_real_disjoint_and_the_same_every_time(tmp_path, monkeypatch, capsys):
    contents = []
    for name in ("a", "b"):
        monkeypatch.setattr("sys.argv", ["make", "--output_dir", str(tmp_path / name)])
        assert corpus.main() == 0
        contents.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert "documents" in capsys.readouterr().out
    rows = {
        name: [json.loads(line) for line in content.splitlines()]
        for name, content in contents[0].items()
    }
    assert len(rows["pretrain.jsonl"]) > 200
    asked, answers = (
        {
            name: {row["messages"][place]["content"] for row in rows[name]}
            for name in ("chats.jsonl", "chats_heldout.jsonl")
        }
        for place in (0, 1)
    )
    assert len(asked["chats.jsonl"]) == len(rows["chats.jsonl"]) > 1000
    assert not asked["chats.jsonl"] & asked["chats_heldout.jsonl"]
    assert answers["chats.jsonl"] == answers["chats_heldout.jsonl"]
    assert len(answers["chats.jsonl"]) > 100
    paths = [{row["path"] for row in rows[name]} for name in rows if name.startswith("pretrain")]
    assert sum(len(found) for found in paths) == len(set.union(*paths))
