"""`prepare_data.py` as a process: its words, a killed worker, its memory."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.data.prepare import units

pytestmark = pytest.mark.usefixtures("small_units")
REPOSITORY = Path(__file__).parents[4]


@pytest.mark.slow
def test_the_script_prepares_reports_and_refuses(tmp_path, source):
    command = [
        *(sys.executable, "prepare_data.py", "--sources", str(source), "--train_tokenizer", "300"),
        *("--output_dir", str(tmp_path / "out")),
    ]
    first = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert first.returncode == 0, first.stderr
    for part in ("documents/s", "tokens/s", "loss tokens", "p50", "[[0 ", "dropped: none"):
        assert part in first.stderr
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "already prepared" in again.stderr
    command[3] = str(tmp_path / "nowhere.jsonl")
    refused = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "nowhere.jsonl: no such file or folder" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_bad_row_of_a_worker_names_its_line_and_a_killed_worker_ends_the_run_with_advice(
    tmp_path, source, tokenizer, workers_for_little, monkeypatch
):
    with source.open("a") as stream:
        stream.write("{oops\n")
    settings = {"sources": [source], "tokenizer_name_or_path": tokenizer, "num_proc": 2}
    with pytest.raises(ConfigurationError, match=r"texts\.jsonl:201: malformed JSON") as caught:
        samples.prepare(**settings, output_dir=tmp_path / "out")
    assert len(caught.value.problems) == 1
    assert not caught.value.problems[0].startswith("-")
    monkeypatch.setattr(units, "_run_unit", _killed)
    with pytest.raises(ConfigurationError, match=r"a worker process was killed.*fewer than --num"):
        samples.prepare(**settings, output_dir=tmp_path / "killed")


def _killed(unit):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


MEASURED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {repository!r})
import logging
from prepare_data import main
main({first!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
main({second!r})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path, tokenizer):
    # One unit and one document size, so that what is measured is streaming, not the cut.
    text = " ".join(samples.sentences(60))
    sizes = {"small": 1_000, "large": 10_000}
    for name, number in sizes.items():
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", compresslevel=1) as stream:
            line = json.dumps({"text": text}) + "\n"
            for _ in range(number * 1000 // len(line)):
                stream.write(line)
    arguments = [
        [
            *("--sources", str(tmp_path / f"{name}.jsonl.gz"), "--output_dir"),
            *(str(tmp_path / name), "--tokenizer_name_or_path", tokenizer),
        ]
        for name in sizes
    ]
    script = MEASURED.format(repository=str(REPOSITORY), first=arguments[0], second=arguments[1])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    grown_mib = float(done.stdout.splitlines()[-1])
    assert grown_mib < 40
