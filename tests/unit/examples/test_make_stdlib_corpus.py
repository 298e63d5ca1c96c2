import json

import pytest

from examples import make_stdlib_corpus as corpus

SOURCE = '''
def outer(a, b=1, *rest, key: str = "x") -> int:
    """Add things.

    Second paragraph.
    """
    # why it is so
    value = a + b
    return value + len(rest) * 2 + len(key) * 3

class C:
    @property
    async def method(self):
        "Short."
        result = await self.something_quite_long_enough()
        return [result for _ in range(3)]

    def undocumented(self):
        return "a body that is long enough to be kept but without any documentation at all"

def one_line(): "doc"; return "x" * 100000 + "a body that is long enough to be kept, if cut well"
'''


def test_instructions_are_signature_and_docstring_and_answers_the_code_without_it():
    functions = dict(corpus.documented_functions(SOURCE))
    assert len(functions) == 2
    first = (
        "Write the Python function `def outer(a, b=1, *rest, key: str='x') -> int`.\n\n"
        "Add things.\n\nSecond paragraph."
    )
    assert functions[first] == (
        'def outer(a, b=1, *rest, key: str = "x") -> int:\n'
        "    # why it is so\n    value = a + b\n    return value + len(rest) * 2 + len(key) * 3"
    )
    assert "async def method(self)" in [*functions][1]
    assert [*functions.values()][1].startswith("async def method(self):\n    result")


def test_a_function_of_a_held_out_file_is_not_trained_on_even_as_a_copy(tmp_path):
    for name in ("one.py", "wsgiref/a.py", "wsgiref/test/b.py", "test/c.py", "encodings/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SOURCE)
    sources = list(corpus.read_sources(tmp_path))
    assert [path for path, _ in sources] == ["one.py", "wsgiref/a.py"], "no tests and tables"
    chats = list(corpus.unique_chats(sources))
    assert {corpus.split_of(path) for path, _ in chats} == {"package"}
    assert len(chats) == 2
    # A whole package is held out, and modules by hash.
    assert corpus.split_of("wsgiref/mime/text.py") == corpus.split_of("wsgiref.py") == "package"
    found = [corpus.split_of(f"module{number}.py") for number in range(1000)]
    assert 15 < found.count("modules") < 50
    assert found.count("train") == 1000 - found.count("modules")


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
    assert len(rows["chats.jsonl"]) > 1000
    answers = {
        name: {row["messages"][1]["content"] for row in rows[name]}
        for name in ("chats.jsonl", "chats_heldout.jsonl")
    }
    assert not answers["chats.jsonl"] & answers["chats_heldout.jsonl"]
    paths = [{row["path"] for row in rows[name]} for name in rows if name.startswith("pretrain")]
    assert sum(len(found) for found in paths) == len(set.union(*paths))
