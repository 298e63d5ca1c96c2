"""`prepare_data.py` as a process: its output, a killed worker, its memory."""

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

from utils.config.errors import ConfigurationError, LostProcessError, OutOfMemoryError
from utils.prepare import units

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[3]


def run(*command):
    environment = {**os.environ, "RAYON_NUM_THREADS": "4", "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, *map(str, command)]
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )


def test_the_script_prepares_reports_and_refuses(tmp_path, source, prepare, tokenizer):
    command = ["prepare_data.py", "--output_dir", tmp_path / "out"]
    command += ["--tokenizer_name_or_path", tokenizer]
    first = run(*command, "--sources", source)
    assert first.returncode == 0, first.stderr
    for part in ("documents/s", "tokens/s", "loss tokens", "p50", "[[0 ", "dropped: none"):
        assert part in first.stderr
    here = prepare("here", sources=[source]) / "tokenizer"
    assert samples.data_bytes(here) == samples.data_bytes(tmp_path / "out" / "tokenizer")
    again = run(*command, "--sources", source)
    assert again.returncode == 0
    assert "already prepared" in again.stderr
    refused = run(*command, "--sources", tmp_path / "nowhere.jsonl")
    assert refused.returncode == 2
    assert "nowhere.jsonl: no such file or folder" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_bad_row_of_a_worker_names_its_line_and_a_killed_worker_ends_the_run_with_advice(
    source, prepare, workers_for_little, monkeypatch
):
    with source.open("a") as stream:
        stream.write("{oops\n")
    with pytest.raises(ConfigurationError, match=r"texts\.jsonl:201: malformed JSON") as caught:
        prepare("out", sources=[source], num_proc=2)
    assert len(caught.value.problems) == 1
    assert not caught.value.problems[0].startswith("-")
    monkeypatch.setattr(units, "_run_unit", _killed)
    with pytest.raises(LostProcessError, match="a worker process was killed: run the same command"):
        prepare("killed", sources=[source], num_proc=2)
    monkeypatch.setattr(units, "memory_kills", iter([3, 4]).__next__)
    with pytest.raises(OutOfMemoryError, match=r"memory ran out: .*fewer than --num_proc 2"):
        prepare("killed", sources=[source], num_proc=2)


def _killed(unit):
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)


MEASURED = """
import resource, sys
sys.path.insert(0, ".")
from prepare_data import main
for name in ("small", "large"):
    flags = ["--sources", f"{sys.argv[1]}/{name}.jsonl.gz", "--output_dir", sys.argv[1] + name]
    main([*flags, "--tokenizer_name_or_path", sys.argv[2]])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_source(tmp_path, tokenizer):
    # One unit and documents of one size: this measures streaming, not the division into units.
    line = json.dumps({"text": " ".join(samples.sentences(60))}) + "\n"
    for name, kilobytes in (("small", 1_000), ("large", 10_000)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", compresslevel=1) as stream:
            stream.writelines([line] * (kilobytes * 1000 // len(line)))
    done = run("-c", MEASURED, tmp_path, tokenizer)
    assert done.returncode == 0, done.stderr
    small_kib, large_kib = map(int, done.stdout.split())
    assert large_kib - small_kib < 40 * 1024
