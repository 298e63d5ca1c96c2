"""The page as text: escaped, without secrets, below its limits; and what the command refuses."""

import json
import re

import pytest
from made_up_run import BEGIN, train_line, write_run

import report
from utils.config.errors import ConfigurationError


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_of_one_run(made_up_run, monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "secret-in-a-value")
    path = made_up_run / "provenance.json"
    path.write_text(path.read_text().replace("made-up", "secret-in-a-value</script>"))
    journal = made_up_run / "metrics.jsonl"
    journal.write_text(journal.read_text().replace("share/code", "share/secret-in-a-value"))
    assert report.main([str(made_up_run)]) == 0
    page = (made_up_run / "report.html").read_text()
    assert capsys.readouterr().out == f"{made_up_run}/report.html\n"
    assert "secret-in-a-value" not in page
    assert "<script>alert" not in page, "a completion is text"
    assert "&lt;script&gt;alert(1)" in page
    for words in ("Finished at step 160 of 160", "step 61 was not finite", "recipes/mine.yaml:3",
                  "4711", "job 77", "c0ffee", "2 processes"):  # fmt: skip
        assert words in page
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?https?:", page), "nothing is fetched"
    assert len(data_of(page)["charts"]) == 7


def test_several_runs_or_a_folder_of_them_are_compared(made_up_run, tmp_path, monkeypatch):
    other = write_run(made_up_run.parent / "other")
    monkeypatch.chdir(tmp_path)
    report.main([str(other)])
    pages = []
    for words in ([str(made_up_run), str(other)], ["runs"], [str(other), "--compare"]):
        report.main([*words, "--output", "page.html"])
        pages.append((tmp_path / "page.html").read_text())
    assert pages[0] == pages[1] == pages[2]
    assert 'href="runs/other/report.html"' in pages[0]
    assert "No setting, version or device differs." in pages[0]


def test_a_long_run_makes_a_small_page_that_keeps_its_extremes(made_up_run):
    lines = [train_line(step, BEGIN + step) for step in range(1, 100_001)]
    lines[77_777]["loss"] = 123.0
    head = {"event": "started", "step": 0, "max_steps": 100_000, "time": BEGIN}
    texts = [json.dumps(line) for line in (head, *lines)]
    (made_up_run / "metrics.jsonl").write_text("\n".join(texts))
    report.main([str(made_up_run)])
    page = (made_up_run / "report.html").read_text()
    assert len(page) < 1_000_000
    loss = data_of(page)["charts"][0]["lines"]
    assert [max(line["y"]) for line in loss if line["style"] == "faint"] == [123.0]


def test_a_picture(made_up_run, tmp_path):
    report.main([str(made_up_run), "--png", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"
    with pytest.raises(ConfigurationError, match=r"curves.docx cannot be written"):
        report.main([str(made_up_run), "--png", str(tmp_path / "curves.docx")])


def test_what_is_no_run_is_refused_all_at_once(made_up_run, tmp_path):
    (tmp_path / "empty").mkdir()
    words = [str(tmp_path / "empty"), str(tmp_path / "gone"), str(made_up_run)]
    with pytest.raises(ConfigurationError) as refused:
        report.main(words)
    assert len(refused.value.problems) == 2
    with pytest.raises(ConfigurationError, match="--compare"):
        report.main([str(made_up_run), str(made_up_run), "--compare"])
