"""A path with a typing error is answered with the most similar existing path, by every reader."""

from pathlib import Path

import pytest

from utils.checkpoints.adoption import foreign_checkpoint
from utils.config.errors import did_you_mean
from utils.config.own_code import source_of
from utils.config.recipes import load_file
from utils.data.arrow_columns import find_split
from utils.data.tokenizers import load_tokenizer
from utils.host.hub import missing_from_cache
from utils.observe.run_state import runs_below
from utils.prepare.source_files import _files_of_path
from utils.run.chat import find_model


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("data/chats/train", "runs/first/final", "models/small"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("data/chats.jsonl", "recipe.yaml", "my_code.py"):
        (tmp_path / file).touch()


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("read", "typed", "meant"),
    [
        (find_split, "data/chat/train", "data/chats/train"),
        (find_split, "dta/chats.jsnl", "data"),
        (find_split, "data/chats.json", "data/chats.jsonl"),
        (lambda path: load_file(Path(path)), "recipes.yaml", "recipe.yaml"),
        (load_tokenizer, "./model/small", "models/small"),
        (find_model, "runs/first_/final", "runs/first/final"),
        (lambda path: runs_below(Path(path)), "run", "runs"),
        (lambda path: list(_files_of_path(path)), "data/chat.jsonl", "data/chats.jsonl"),
        (lambda path: foreign_checkpoint(path, Path("new")), "runs/frst", "runs/first"),
        (source_of, "mycode:loss", "my_code.py"),
    ],
)
def test_the_nearest_path_is_named(read, typed, meant):
    with pytest.raises(ValueError, match=rf"\(did you mean {meant}\?\)"):
        read(typed)


@pytest.mark.usefixtures("files")
def test_no_path_is_named_that_is_not_alike_or_is_there(tmp_path):
    assert did_you_mean("elsewhere/train") == ""
    assert did_you_mean("data/chats.jsonl") == ""
    assert did_you_mean("x" * 5000) == ""
    assert did_you_mean("~nobody-of-this-name/chats.jsonl") == ""
    assert did_you_mean(tmp_path / "run/first") == f" (did you mean {tmp_path}/runs/first?)"
    assert "no local folder (did you mean models/small?)" in missing_from_cache("models/smalll")


@pytest.mark.usefixtures("files")
def test_a_node_that_lacks_a_path_of_the_check_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    place = f" on n2 ({tmp_path}/data/chat)"
    assert did_you_mean("data/chat") == f"{place} (did you mean data/chats?)"
    monkeypatch.setenv("STOKER_SUBMITTED", "slurm/submit.sh ...")
    told = f"no such directory{place}, but slurm/submit.sh found it: it is not on a file system"
    with pytest.raises(ValueError, match=r"exclude=n2 leaves this node out\. Make one") as caught:
        find_split("data/chat")
    assert told in str(caught.value)
