"""Paths in foreign files; and writes that leave the old file or the new one, never a part."""

import os

import pytest

from utils.config.errors import ConfigurationError
from utils.host.atomic_files import paths_inside, replace_text
from utils.host.machine import host_name


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path, monkeypatch):
    def fail(_descriptor):
        raise OSError(28, "No space left on device")

    replace_text(tmp_path / "file", "old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        replace_text(tmp_path / "file", "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@pytest.fixture
def foreign(tmp_path):
    """Make a folder with one good file, and with all kinds of links out of the folder."""
    folder = tmp_path / "real"
    (folder / "part").mkdir(parents=True)
    for path in (folder / "file", folder / "part" / "inner", tmp_path / "outside"):
        path.write_text("content")
    (folder / "link").symlink_to(folder / "file")
    (folder / "away").symlink_to(tmp_path)
    (folder / "broken").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    (tmp_path / "linked").symlink_to(folder)  # a link by the user is allowed
    return tmp_path / "linked"


def test_names_of_files_in_the_folder_become_their_paths(foreign):
    names = ["file", "part/inner", "absent", "absent/too", "..hidden", "größe.txt", "a b"]
    assert paths_inside(foreign, names, "index.json") == {name: foreign / name for name in names}
    assert paths_inside(foreign, ["file", "file"], "index.json"), "named twice, as by an index"
    assert paths_inside(foreign, ["link", "away/outside", "broken"], "x", links=True)


@pytest.mark.parametrize(
    "name",
    [
        "../outside", "part/../../outside", "part/../file", "/etc/passwd", "//etc/passwd", "..",
        ".", "", "./file", "part/", "part//inner", "a\0b", "a\nb", "a\\b", "..\\outside",
        "\udc80", "\u202eb", None, 3, ["file"], {"file": 1}, "pipe", "part", "file/inner",
        "x" * 300, "y/" * 3000 + "y", "link", "away/outside", "away", "broken",
    ],
)  # fmt: skip
def test_a_name_that_leads_out_of_the_folder_or_to_no_file_is_refused(foreign, name):
    with pytest.raises(ConfigurationError, match=r"(?s)index.json names .*nothing was read"):
        paths_inside(foreign, ["file", name], "index.json")
    if name not in ("link", "away/outside", "broken"):
        with pytest.raises(ConfigurationError, match=r"index.json names "):
            paths_inside(foreign, ["file", name], "index.json", links=True)


@pytest.mark.parametrize(
    "pair", [("a", "A"), ("part/x", "Part/x"), ("\u00e9", "e\u0301"), ("ß", "ss")]
)
def test_two_names_of_what_may_be_one_file_are_refused(foreign, pair):
    with pytest.raises(ConfigurationError, match="which some file systems treat as the same"):
        paths_inside(foreign, pair, "index.json")
    assert paths_inside(foreign, [pair[0], pair[0]], "index.json"), "named twice, as by an index"


def test_a_write_does_not_go_through_a_link_in_a_strangers_folder(tmp_path):
    (tmp_path / "victim").write_text("intact")
    (tmp_path / "file").symlink_to(tmp_path / "victim")
    draft = f".file.{host_name()}.{os.getpid()}.tmp"
    (tmp_path / draft).symlink_to(tmp_path / "victim")
    replace_text(tmp_path / "file", "new")
    assert (tmp_path / "victim").read_text() == "intact"
    assert (tmp_path / "file").read_text() == "new"
    assert not (tmp_path / "file").is_symlink()
