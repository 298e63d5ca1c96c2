import os

import datasets
import pytest

from utils.data.prepare.sources import list_sources


def names(listing, root) -> list[str]:
    return [os.path.relpath(file.path, root) for file in listing.files]


@pytest.fixture
def tree(tmp_path):
    for name in ("b.txt", "a/z.md", "a/deep/c.jsonl", "a/deep/d.parquet", ".git/config.txt"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    return tmp_path / "root"


def test_a_folder_is_walked_recursively_in_sorted_order_without_hidden_files(tree):
    listing = list_sources([str(tree)], "auto")
    assert names(listing, tree) == ["a/deep/c.jsonl", "a/deep/d.parquet", "a/z.md", "b.txt"]
    assert [file.kind for file in listing.files] == ["jsonl", "parquet", "text", "text"]
    assert not listing.problems


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.jsonl", "jsonl", None),
        ("a.json-lines", "jsonl", None),
        ("a.JSONL.gz", "jsonl", "gzip"),
        ("a.jsonl.zst", "jsonl", "zstd"),
        ("a.parquet", "parquet", None),
        ("a.txt.gz", "text", "gzip"),
        ("a.py", "text", None),
    ],
)
def test_the_suffix_decides_the_kind(tmp_path, name, kind, compression):
    (tmp_path / name).write_text("x")
    (file,) = list_sources([str(tmp_path / name)], "auto").files
    assert (file.kind, file.compression) == (kind, compression)


def test_symbolic_links_back_up_do_not_end_in_a_loop(tree):
    # With four links the paths below them number 4 to the power of 40, where the system stops.
    for number in range(4):
        (tree / "a" / f"up{number}").symlink_to(tree)
    listing = list_sources([str(tree)], "auto")
    assert len(listing.files) == 4
    assert not listing.ignored


def test_a_file_that_two_paths_reach_is_taken_once(tree):
    (tree / "b2.txt").symlink_to(tree / "b.txt")
    listing = list_sources([str(tree), str(tree / "b.txt")], "auto")
    assert len(listing.files) == 4
    assert listing.ignored["given twice"] == 2


def test_unknown_suffixes_are_passed_over_and_counted_unless_text_is_asked_for(tree):
    (tree / "x.weird").write_text("x")
    assert list_sources([str(tree)], "auto").ignored == {".weird": 1}
    assert len(list_sources([str(tree)], "text").files) == 5


def test_every_fault_is_collected_in_one_pass(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.weird").write_text("x")
    os.mkfifo(tmp_path / "pipe.txt")
    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        str(tmp_path / "dict")
    )
    given = ["gone.jsonl", "*.none", "empty.jsonl", "folder", "x.weird", "pipe.txt", "dict"]
    problems = list_sources([str(tmp_path / name) for name in given], "auto").problems
    expected = [
        "no such file or folder",
        "no file matches this pattern",
        "empty source, the file has 0 bytes",
        "empty source, no file in it can be read",
        "unknown file type '.weird'",
        "not a regular file",
        f"a DatasetDict of 1 splits; name one, as in {tmp_path}/dict/test",
    ]
    for name, problem, part in zip(given, problems, expected, strict=True):
        assert problem.startswith(str(tmp_path / name))
        assert part in problem


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.json", '[\n {"text": "a"}]', "json"),
        ("a.json", '\ufeff{"version": "1", "data": [{"text": "a"}]}', "json"),
        ("a.json", '{"text": "a"}\n{"text": "b"}\n', "jsonl"),
        ("a.jsonl", '[{"text": "a"}]', "json"),
        ("a.csv", "text\na\n", "csv"),
        ("a.tsv", "text\na\n", "csv"),
    ],
)
def test_the_beginning_tells_arrays_from_lines(tmp_path, name, text, kind):
    (tmp_path / name).write_text(text)
    (file,) = list_sources([str(tmp_path / name)], "auto").files
    assert file.kind == kind


def test_other_json_and_pointers_of_git_lfs_are_refused(tmp_path):
    (tmp_path / "a.json").write_text('{\n "text": "a"\n}')
    (tmp_path / "b.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid x")
    problems = list_sources([str(tmp_path / n) for n in ("a.json", "b.parquet")], "auto").problems
    assert "a.json: JSON that is no array of records" in problems[0]
    assert "b.parquet: is a pointer of Git LFS" in problems[1]
