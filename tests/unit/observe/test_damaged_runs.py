"""report.py and status.py on damaged runs: nothing raises, and what is skipped is counted."""

import functools
import json
import math
import os
import random
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote_to_bytes
from xml.etree import ElementTree

import jinja2
import pytest
from made_up_run import BEGIN, iso, write_run

import report
import status
from utils.checkpoints.files import FileRecord, Manifest, file_digests, write_manifest
from utils.config.errors import ConfigurationError
from utils.host.journal_file import read_journal, read_line
from utils.observe.page import write_pages
from utils.observe.status_lines import show_runs

FLIPS = 120
VOID = {"meta", "br", "input"}


class Page(HTMLParser):
    """A page whose tags are all closed, with its text."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []
        page.encode()
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]", page)

    def handle_starttag(self, tag: str, _: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def with_checkpoint(run: Path, step: int = 100) -> Path:
    """Add a committed checkpoint that holds copies of the record."""
    copies = run / f"checkpoint-{step}" / "run"
    copies.mkdir(parents=True)
    names = ["run/config.yaml", "run/provenance.json"]
    for name in names:
        shutil.copy(run / Path(name).name, copies)
    files = [copies.parent / name for name in names]
    sizes = [file.stat().st_size for file in files]
    records = dict(zip(names, map(FileRecord, sizes, file_digests(files)), strict=True))
    facts = {"step": step, "tokens": 10**6, "time": iso(BEGIN), "files": records}
    write_manifest(copies.parent, Manifest("r", 2, "ddp", 4, **facts))
    return run


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory, monkeypatch) -> Path:
    """Make a run with all files that report.py and status.py read."""
    # Compile the templates only once: this takes most of the time of a page.
    compiled = jinja2.FileSystemBytecodeCache(str(tmp_path_factory.getbasetemp()))
    environment = functools.partial(jinja2.Environment, bytecode_cache=compiled)
    monkeypatch.setattr("jinja2.Environment", environment)
    run = write_run(tmp_path / "runs" / "run")
    (run / "profile").mkdir()
    for name in ("out-of-memory-rank0.txt", "hang.txt", "profile/kernels.txt"):
        (run / name).write_text("last words")
    return with_checkpoint(run)


def looked_at(run: Path) -> tuple[Page, str, dict]:
    """Show a run in all ways except as a picture; return the page, the lines and the JSON."""
    page = write_pages([run], None, None).read_text(encoding="utf-8")
    data = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    json.loads(data[1], parse_constant=pytest.fail)
    lines = show_runs([str(run)], None, as_json=False)
    found = json.loads(str(show_runs([str(run)], None, as_json=True)), parse_constant=pytest.fail)
    return Page(page), "\n".join(str(line) for line in lines.renderables), found[0]


def flipped(content: bytes, chance: random.Random) -> bytes:
    """Return the content with one changed byte: a flipped bit or another character of JSON."""
    place = chance.randrange(len(content))
    byte = chance.choice([content[place] ^ 1 << chance.randrange(8), *b'"\\,}]0-e\n\x00\xff'])
    return content[:place] + bytes([byte]) + content[place + 1 :]


def test_a_flipped_byte_in_any_file_breaks_nothing(run):
    chance = random.Random(0)
    names = [
        "metrics.jsonl", "provenance.json", "config.yaml", "nonfinite-step-61.json", "hang.txt",
        ".lock/owner-3", "checkpoint-100/manifest.json", "profile/kernels.txt",
    ]  # fmt: skip
    # The journal is short, because each flip is shown as a whole run.
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([*lines[:12], *lines[55:75], *lines[-3:]]))
    whole = {name: (run / name).read_bytes() for name in names}
    for number in range(FLIPS):
        name = names[number // 2 % len(names) if number % 2 else 0]
        (run / name).write_bytes(flipped(whole[name], chance))
        page, lines, found = looked_at(run)
        skipped = found["skipped_lines"]
        assert ("damaged line" in page.text) == ("damaged line" in lines) == (skipped > 0)
        (run / name).write_bytes(whole[name])


def line(**fields: object) -> bytes:
    known = {"event": "train", "step": 161, "time": BEGIN + 3000, "loss": 1.0, "max_steps": 160}
    return json.dumps(known | fields).encode()


LOST = b'{"event": "train", "step": 161, "time": 1800003000, "loss": 1e400, "step_time_s": 1e999}'
# Lines to add at the end of a journal, and how many of them are damaged.
LINES: dict[str, tuple[bytes, int]] = {
    "zeros of a crashed file system": (bytes(4096) + line(), 1),
    "ten megabytes": (b'{"event": "' + b"x" * 10**7, 1),
    "no object": (b'[1]\n7\n"train"\nnull\ntrue\n{}', 6),
    "carriage returns": (b"\r\n\r\n" + line() + b"\r", 0),
    "invalid UTF-8": (line().replace(b"train", b"tr\xffin"), 1),
    "half a surrogate pair": (line(split="\ud800") + b"\n" + line(**{"loss/\udfff": 1.0}), 2),
    "no step": (line(step=None) + b"\n" + line(step=-1) + b"\n" + line(step="161"), 3),
    "no time": (line(time="now") + b"\n" + line(time=None) + b"\n" + line(time=1e300), 3),
    "no event": (line(event=7) + b"\n" + line(event=None) + b"\n" + line(event=["train"]), 3),
    "steps of a run": (line(max_steps=-1) + b"\n" + line(max_steps=1.5), 2),
    "an unknown event": (line(event="eclipse"), 0),
    "numbers as texts": (line(loss="1.0") + b"\n" + line(step_time_s="1"), 2),
    "figures beyond float64": (LOST, 0),
    "nulls": (line(loss=None, step_time_s=None, tokens_per_s=None, slowest_rank=None), 0),
    "rows of other types": (line(event="samples", samples=[1]) + b"\n" + line(memory_by_rank=5), 2),
    "steps that go back": (line(step=3) + b"\n" + line(step=1), 0),
    "a start beyond the end": (line(event="resumed", step=10**9), 0),
    "a hook's fields": (line(**{"reward/mean": "high", "reward/all": [1], "note": {"a": 1}}), 0),
    "an escape code": (line(event="eval", split="\x1b[2J", eval_loss=1.0), 1),
    "a tag": (line(event="eval", split="<b>&amp;", **{"eval_<b>&amp;_loss": 1.0}), 0),
    "cut off": (line()[:-9], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_odd_lines_of_a_journal_are_skipped_and_counted(name, run):
    content, damaged = LINES[name]
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(content + b"\n" + line(event="summary", step=162, train_runtime=1.0) + b"\n")
    page, lines, found = looked_at(run)
    assert found["skipped_lines"] == damaged
    said = f"metrics.jsonl: {damaged} damaged line{'s' * (damaged > 1)} skipped"
    assert (said in page.text, said in lines) == (damaged > 0, damaged > 0)
    assert (found["step"], found["state"]) == (162, "finished")
    assert read_journal(run / "metrics.jsonl")[-1]["step"] == 162


def test_a_measure_that_cannot_be_is_left_out_and_a_figure_is_infinite():
    """Readers add measures up, and turn measures into dates and whole numbers."""
    wrong = {"step_time_s": 1e300, "tokens_per_s": "NaN", "mfu": -1e18, "size_bytes": 10**400}
    read = read_line(line(**wrong, wait_s=2, loss=-1e300, grad_norm="Infinity", reward=1e300))
    assert read is not None
    assert not wrong.keys() & read.keys()
    assert read["wait_s"] == 2
    assert [read[key] for key in ("loss", "grad_norm", "reward")] == [-math.inf, math.inf, math.inf]


NAMES = ["line\nend", "\x1b[31mred\x1b]0;title\x07", "<b>&\"'", "caf\udce9", "$x$ 1% #?;="]


@pytest.mark.parametrize("name", NAMES)
def test_odd_names_of_a_run_reach_no_terminal_and_no_page(name, run, capsys):
    odd = shutil.move(run, run.with_name(name))
    other = write_run(odd.parent / "other")
    compared = odd.parent / "compared.html"
    picture = odd.parent / "curves.svg"
    report.main([str(other), "--png", str(picture)])
    report.main([str(odd), "--png", str(picture)])
    report.main([str(other), str(odd), "--output", str(compared), "--png", str(picture)])
    ElementTree.parse(picture)
    Page((odd / "report.html").read_text(encoding="utf-8"))
    page = compared.read_text(encoding="utf-8")
    Page(page)
    links = [os.fsdecode(unquote_to_bytes(link)) for link in re.findall('href="(.*?)"', page)]
    assert {odd.parent / link for link in links} == {odd / "report.html", other / "report.html"}
    status.main([str(odd)])
    status.main(["--all", str(odd.parent)])
    shown = capsys.readouterr().out
    assert all(line.isprintable() for line in shown.split("\n"))
    shown.encode()
    status.main([str(odd), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["run"] == str(odd)


FILES = [
    *("final", ".lock", "checkpoint-7", "provenance.json", "metrics.jsonl", "config.yaml"),
    *("hang.txt", "out-of-memory-rank0.txt", "nonfinite-step-61.json", "profile", "wandb"),
    *(".lock/owner-4", "checkpoint-100/manifest.json", "checkpoint-100/run", "report.txt"),
]


@pytest.mark.parametrize("kind", ["file", "directory", "link to itself", "gone", "binary"])
def test_files_of_another_kind_break_nothing(kind, run):
    for name in FILES:
        copy = run.parent / name.replace("/", "-") / "run"
        shutil.copytree(run, copy)
        path = copy / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if kind == "link to itself":
            path.symlink_to(path.name)
        elif kind == "directory":
            path.mkdir()
        elif kind != "gone":
            path.write_bytes(b"" if kind == "file" else bytes(range(256)) * 9)
        looked_at(copy)
        shutil.rmtree(copy.parent)
    (run.parent / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="is no run directory"):
        show_runs([str(run.parent / "empty")], None, as_json=False)
    with pytest.raises(ConfigurationError, match="is no run and holds none"):
        report.main([str(run.parent / "empty")])


ENTRIES = {
    "no object": [1, None, "start"],
    "an odd time": [{"time": "0001-01-01T00:00:00", "script": "x"}],
    "other types": [{"launch": [], "slurm": 7, "git": "c0ffee", "versions": [], "argv": "x y"}],
    "odd places": [{"slurm": {"job_id": "../..", "job_name": "x" * 300, "restart_count": "x"}}],
    "halves of surrogate pairs": [{"argv": ["\ud800"], "changed": {"run_name": "\udfff"}}],
    "nulls": [dict.fromkeys(("time", "argv", "launch", "slurm", "git", "versions", "changed"))],
    "nothing": [{}],
}


@pytest.mark.parametrize("name", ENTRIES)
def test_odd_entries_of_provenance_break_nothing(name, run):
    shutil.rmtree(run / "checkpoint-100")
    (run / "provenance.json").write_text(json.dumps({"run_id": "r", "starts": ENTRIES[name]}))
    (run / "config.yaml").write_text('train_data: 7\nmax_steps: "\\ud800"\nnested: [{a: .nan}]\n')
    looked_at(run)
