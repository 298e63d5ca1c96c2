import os

import datasets
import pytest

from utils.prepare.source_files import list_sources


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a/z.md", "a/deep/c.jsonl", "a/deep/d.parquet", ".git/config.txt"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path / "root"


def test_a_folder_is_walked_in_sorted_order_without_hidden_files_and_unknown_kinds(tree):
    (tree / "x.weird").write_text("x")
    files, remarks = list_sources([str(tree)], "auto")
    names = [os.path.relpath(file.path, tree) for file in files]
    assert names == ["a/deep/c.jsonl", "a/deep/d.parquet", "a/z.md", "b.txt"]
    assert [file.kind for file in files] == ["jsonl", "parquet", "text", "text"]
    assert not remarks.problems
    assert "1 x .weird" in str(remarks.lines)
    assert len(list_sources([str(tree)], "text")[0]) == 5


def test_what_links_and_paths_reach_twice_is_taken_once(tree):
    # Four links up: a walk that follows them again and again would meet 4 to the power of 40 paths.
    for number in range(4):
        (tree / "a" / f"up{number}").symlink_to(tree)
    (tree / "b2.txt").symlink_to(tree / "b.txt")
    files, remarks = list_sources([str(tree), str(tree / "b.txt")], "auto")
    assert len(files) == 4
    assert "2 x given twice" in str(remarks.lines)


def test_every_fault_is_collected_in_one_pass(tmp_path):
    faults = {
        "gone.jsonl": "no such file or folder",
        "*.none": "no file matches this pattern",
        "empty.jsonl": "empty source, the file has 0 bytes",
        "folder": "empty source, no file in it can be read",
        "x.weird": "neither text nor records",
        "pipe.txt": "not a regular file",
        "dict": "has no split 'train'; its files are of test, test_sft",
        "b.parquet": "is a pointer of Git LFS",
    }
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.weird").write_text("x")
    os.mkfifo(tmp_path / "pipe.txt")
    table = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"test": table, "test_sft": table}).save_to_disk(str(tmp_path / "dict"))
    (tmp_path / "b.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid x")
    _, remarks = list_sources([str(tmp_path / name) for name in faults], "auto")
    for problem, (name, fault) in zip(remarks.problems, faults.items(), strict=True):
        assert problem.startswith(str(tmp_path / name))
        assert fault in problem


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json-lines", "x", "jsonl"),
        ("a.py", "x", "text"),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', "jsonl"),
        ("a.JSONL", '[{"text": "a"}]', "json"),
        ("a.json", '{\n "text": "a"\n}', "json"),
        ("a.jsonl", '{\n "text": "a"\n}\n{\n "text": "b"\n}', "json"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b"}', "jsonl"),
        ("a.jsonl", '[{"role": "user"}]\n[{"role": "user"}]', "jsonl"),
        ("a.tsv", "text\na\n", "csv"),
    ],
)
def test_suffix_and_beginning_tell_the_kind(tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    ((file,), _) = list_sources([str(tmp_path / name)], "auto")
    assert (file.kind, file.compression) == (kind, None)


def test_in_a_folder_an_object_over_many_lines_describes_the_other_files(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "stats.json").write_text('{\n "rows": 1\n}')
    (tmp_path / "b.json").write_text('{\n "data": [\n  {"text": "b"}\n ]\n}')
    files, remarks = list_sources([str(tmp_path)], "auto")
    assert [os.path.basename(file.path) for file in files] == ["a.jsonl", "b.json"]  # noqa: PTH119
    assert "1 x .json" in str(remarks.lines)
