"""The page's text is escaped, without secrets, and below its limits; refusals of the command."""

import json
import math
import re
import time

import pytest
from made_up_run import BEGIN, loss, train_line, write_run, write_run_of_ranks

import report
from utils.config.errors import ConfigurationError
from utils.observe.history import read_run


@pytest.fixture(autouse=True)
def _time_zone(monkeypatch):
    """Restore the time zone."""
    yield
    monkeypatch.undo()
    time.tzset()


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_the_page_of_one_run(made_up_run, monkeypatch, capsys):
    monkeypatch.setenv("SOME_API_KEY", "secret-in-a-value")
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()
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
                  "4711", "job 77", "c0ffee", "<dd>2 x H100 (ddp)</dd>", "<dd>web</dd>",
                  "<dd>0.001, cosine</dd>", "<dd>8 x 512 tokens = 4,096 a step</dd>",
                  "first started 2027-01-15 09:00:00 CET", "perplexity"):  # fmt: skip
        assert words in page
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?https?:", page), "nothing is fetched"
    charts = {chart["title"]: chart for chart in data_of(page)["charts"]}
    assert len(charts) == 8
    assert charts["Loss"]["unit"] == "nats per token"
    assert (charts["Throughput"]["unit"], charts["Device memory"]["unit"]) == ("tokens/s", "GiB")
    trained, evaluated = charts["Perplexity"]["lines"]
    assert trained["y"] == pytest.approx(
        [math.exp(y) for y in charts["Loss"]["lines"][1]["y"]], rel=1e-4
    )
    assert evaluated["y"][-1] == pytest.approx(math.exp(loss(160) + 0.1), rel=1e-5)
    for new in ("Slowest", "slowest", "Memory by rank", "accuracy", "<summary>hang.txt"):
        assert new not in page, "a journal without the keys"


def test_a_secret_in_any_file_of_a_run_is_on_no_page(made_up_run, monkeypatch):
    """Older versions and users may have written a secret into these files in plain text."""
    secret = "quo\"te's \\canary: <more>"
    monkeypatch.setenv("MY_SECRET", secret)
    path = made_up_run / "provenance.json"
    content = json.loads(path.read_text())
    content["starts"][-1]["argv"] += ["a prompt", secret]
    content["starts"][-1]["changed"] = {"hub_model_id": secret}
    path.write_text(json.dumps(content))
    lock = made_up_run / ".lock" / "owner-3"
    lock.write_text(json.dumps({**json.loads(lock.read_text()), "error": f"of {secret}"}))
    (made_up_run.parent / "train-77.log").write_text(
        f"12:00:01  job 77: rank 1 of {secret}; requeued, start 2 will resume\n"
    )
    with (made_up_run / "config.yaml").open("a") as file:
        file.write(f"optim_args: {json.dumps(secret)}\n")
    line = {"event": "samples", "step": 160, "time": BEGIN + 9000}
    line["samples"] = [{"prompt": secret, "completion": secret}]
    with (made_up_run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    report.main([str(made_up_run)])
    page = (made_up_run / "report.html").read_text()
    assert "canary" not in page
    assert "&#39;a prompt&#39; " in page, "a command to paste"
    assert [start.error for start in read_run(made_up_run).starts] == [
        "rank 1 of ***", None, "of ***"
    ]  # fmt: skip


def test_ranks_sources_accuracy_and_what_a_failure_left(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret-in-a-value")
    run = write_run_of_ranks(tmp_path / "run")
    (run / "out-of-memory-rank2.txt").write_text("gpu11: <b>out of memory</b>\nsecret-in-a-value")
    (run / "hang.txt").write_text("rank 5 hangs")
    (run / "profile").mkdir()
    (run / "profile" / "kernels.txt").write_text("ampere_gemm 41 %")
    (run / "profile" / "trace-rank0.json.gz").touch()
    report.main([str(run)])
    page = (run / "report.html").read_text()
    assert "secret-in-a-value" not in page
    for words in ("&lt;b&gt;out of memory", "rank 5 hangs", "ampere_gemm 41 %", "accuracy 49.",
                  "trace-rank0.json.gz", "Waiting in Slurm&#39;s queue", "in 82% of"):  # fmt: skip
        assert words in page
    row = re.search(r"<td>rank 5 \(gpu12\)</td>(.*?)</tr>", page)[1]
    assert re.findall(r">([^<]+)</td>", row) == ["82%", "4m27s", "5.3%"]
    rows = re.findall(r"<td>(rank 2 \(gpu11\))</td><td>(\w+)</td>.*?>(\d+\.\d)</td>", page)
    assert [phase for _, phase, _ in rows] == ["training", "evaluation", "saving"]
    assert [float(gib) for *_, gib in rows] == pytest.approx([68.2, 51.2, 72.2], abs=0.3)
    charts = {chart["title"]: chart["lines"] for chart in data_of(page)["charts"]}
    named = {title: [line["label"] for line in lines] for title, lines in charts.items()}
    assert named["Loss of each source"] == ["web", "code"]
    assert named["Token accuracy"] == ["web"]
    assert named["Slowest rank"][0] == "rank 5 (gpu12)"
    assert named["Slowest rank"][3:] == ["other ranks"]
    by_rank = named["Memory by rank and phase"]
    assert "rank 2 (gpu11)" in by_rank
    assert by_rank[6:] == ["evaluation", "saving"]
    assert max(charts["Memory by rank and phase"][-1]["y"]) > 72


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
    begin = time.process_time()
    for text in texts:
        json.loads(text)
    parsed = time.process_time()
    report.main([str(made_up_run)])
    # A page takes 2.2 to 8.5 times as long as parsing, on fast and slow machines.
    assert time.process_time() - parsed < 20 * (parsed - begin)
    page = (made_up_run / "report.html").read_text()
    assert len(page) < 1_000_000
    losses = data_of(page)["charts"][0]["lines"]
    assert [max(line["y"]) for line in losses if line["style"] == "faint"] == [123.0]


def test_a_picture(made_up_run, tmp_path):
    report.main([str(made_up_run), "--png", str(tmp_path / "curves.png")])
    assert (tmp_path / "curves.png").read_bytes()[1:4] == b"PNG"
    report.main([str(made_up_run), "--png", str(tmp_path / "curves.svg")])
    labels = re.findall(r"<text.*?>(.*?)</text>", (tmp_path / "curves.svg").read_text(), re.DOTALL)
    assert labels
    assert not [label for label in labels if "$" in label]
    with pytest.raises(ConfigurationError, match=r"curves.docx cannot be written"):
        report.main([str(made_up_run), "--png", str(tmp_path / "curves.docx")])


def test_a_picture_shows_the_points_of_the_page(made_up_run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.extend(figure.axes)
    )
    report.main([str(made_up_run), "--png", str(tmp_path / "curves.png")])
    charts = {axes.get_title("left"): axes.lines for axes in drawn if axes.get_title("left")}
    on_the_page = data_of((made_up_run / "report.html").read_text())["charts"]
    assert list(charts) == [chart["title"] for chart in on_the_page[:5]]
    for chart in on_the_page[:5]:
        for line, curve in zip(chart["lines"], charts[chart["title"]], strict=False):
            assert list(curve.get_xdata()) == line["step"]
            shown = [None if math.isnan(y) else y for y in curve.get_ydata()]
            assert shown == line["y"]


def test_what_is_no_run_is_refused_all_at_once(made_up_run, tmp_path):
    (tmp_path / "empty").mkdir()
    words = [str(tmp_path / "empty"), str(tmp_path / "gone"), str(made_up_run)]
    with pytest.raises(ConfigurationError) as refused:
        report.main(words)
    assert len(refused.value.problems) == 2


def test_a_comparison_that_is_replaced_is_named(made_up_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [str(made_up_run), str(write_run(tmp_path / "other"))]
    for said in ("", "report.html is replaced; --output FILE.html keeps it\n"):
        assert report.main(words) == 0
        assert capsys.readouterr() == ("report.html\n", said)
