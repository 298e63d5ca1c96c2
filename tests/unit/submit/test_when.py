"""slurm/submit.sh --when: time limits, restarts, and the table from recorded answers of Slurm."""

import datetime
import json
import os
import re
import shlex
import time

import pytest
from launching import ROOT

from utils.config.errors import ConfigurationError
from utils.submit import when

HOUR = 3600
# Recorded from Slurm 22.05: sbatch --verbose --test-only. Later versions print the same.
OPTIONS = """\
sbatch: defined options
sbatch: -------------------- --------------------
sbatch: exclusive           : exclusive
sbatch: gpus-per-node       : h100:8
sbatch: job-name            : train
sbatch: nodes               : 2
sbatch: ntasks-per-node     : 1
sbatch: test-only           : set
sbatch: time                : 1-00:00:00
sbatch: verbose             : 1
sbatch: -------------------- --------------------
sbatch: end of defined options
"""
# Slurm's answers by the last --nodes: idle, busy for six hours, behind endless jobs, too many.
SBATCH = """\
#!/bin/bash
echo "$*" >>{calls}
[[ $SLURM_TIME_FORMAT == standard ]] || exit 9
cat {options}
nodes=2
for word; do
  [[ $word != --nodes=* ]] || nodes=${{word#*=}}
done
case $nodes in
1) echo "sbatch: Job 7 to start at {now} using 64 processors on nodes n1 in partition main" ;;
2) echo "sbatch: Job 7 to start at {later} using 64 processors on nodes n[1-2] in partition main" ;;
4) echo "sbatch: Job 7 to start at 4068-01-01T00:00:00 using 64 processors on nodes n[1-4]" ;;
8) echo "allocation failure: Requested node configuration is not available"; exit 1 ;;
esac
"""
# The dry run: 1,000 steps, 300 of them done, 7 hours of work on eight GPUs.
DRY_RUN = """\
import os, sys  # parse_pretraining
gpus = sys.argv[sys.argv.index("--assume") + 1] if "--assume" in sys.argv else None
print("12:00:00  run: 1,000 steps = 1.00 epochs of 9 sequences = 36,000,000 tokens with padding")
print("12:00:00  run directory: {run} (resumes)")
if gpus is None and os.environ["WORLD_SIZE"] not in ("8", "16"):
    sys.exit("  - does not divide")
if gpus:
    nodes = int(gpus[0])
    print(f"12:00:00  forecast: {{1000 * nodes:,}} to {{2000 * nodes:,}} tokens/s on {{gpus}}, 3 s")
print("12:00:00  a start would resume from {run}/checkpoint-300")
"""


def test_time_limits_are_parts_of_the_asked_one_and_one_that_just_suffices():
    # Half of a start is training: with ten minutes of overhead at least twenty minutes.
    assert when.candidate_time_limits(24 * HOUR, 600, 100 * HOUR) == [
        24 * HOUR,
        12 * HOUR,
        6 * HOUR,
        3 * HOUR,
    ]
    assert when.candidate_time_limits(2 * HOUR, 600, 100 * HOUR) == [7200, 3600, 1800]
    # 1.1 times (2 h 50 min + 10 min), in steps of ten minutes.
    assert when.candidate_time_limits(24 * HOUR, 600, 10_200)[-2:] == [12_000, 3 * HOUR]
    with pytest.raises(ConfigurationError, match="too short: 10m01s of each start"):
        when.candidate_time_limits(1200, 601, HOUR)


def test_restarts_cost_their_start_up_and_another_wait():
    # 10 h of training, 60 min of each start until the signal, 10 of them for the start-up.
    starts, busy_s, end_s = when.forecast_jobs(1800, 10 * HOUR, HOUR, 600)
    assert (starts, busy_s) == (12, 10 * HOUR + 12 * 600)
    assert end_s == busy_s + 12 * 1800
    # A requeued job starts two minutes later at the earliest.
    assert when.forecast_jobs(0, 50 * 60, HOUR, 600) == (1, HOUR, HOUR)
    assert when.forecast_jobs(0, 51 * 60, HOUR, 600) == (2, 71 * 60, 71 * 60 + 120)


@pytest.fixture
def table(tmp_path, monkeypatch, capsys):
    """Return a function that prints the table for words after --when, with stand-ins."""
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "STOKER_"))]:
        monkeypatch.delenv(name)
    commands, job = tmp_path / "commands", tmp_path / "multinode_job.sh"
    commands.mkdir()
    job.write_text("#!/bin/bash\n#SBATCH --signal=B:USR1@300\n")
    (tmp_path / "options").write_text(OPTIONS)
    (tmp_path / "train.py").write_text(DRY_RUN.format(run=tmp_path / "run"))
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)

    def call(gpu: str = "", *options: str) -> str:
        now = datetime.datetime.now().replace(microsecond=0)
        texts = {"calls": tmp_path / "calls", "options": tmp_path / "options"}
        texts |= {"now": now.isoformat()}
        texts |= {"later": (now + datetime.timedelta(hours=6)).isoformat()}
        (commands / "sbatch").write_text(SBATCH.format(**texts))
        (commands / "sbatch").chmod(0o755)
        words = [str(len(options)), *options, job.name, str(tmp_path / "train.py"), "--seed", "a b"]
        assert when.main([str(tmp_path), gpu, *words]) == 0
        return capsys.readouterr().out

    call.options, call.script = tmp_path / "options", tmp_path / "train.py"
    call.calls = tmp_path / "calls"
    return call


def test_each_choice_has_a_row_and_the_best_one_its_command(table):
    before = time.time()
    shown = table("H100-80GB", "--account=me too")
    lines = shown.splitlines()
    # One node: 25.2 million tokens at 1,000 tokens/s are 7 h, and 5 minutes for each start-up.
    (one,) = [line for line in lines if re.match(r" +1 +24:00:00 ", line)]
    assert one.split()[-2:] == ["56.7", "1"]
    end = time.mktime(time.strptime(" ".join(one.split()[4:6]), "%Y-%m-%d %H:%M"))
    assert abs(end - before - 7 * HOUR - 300) < 600
    # 3:00:00 less five minutes each for signal and start-up: 7 h in 3 starts.
    (short,) = [line for line in lines if re.match(r" +1 +3:00:00 ", line)]
    assert short.split()[-2:] == ["58.0", "3"]
    (two,) = [line for line in lines if re.match(r" +2 +24:00:00 ", line)]
    assert two.split()[-2:] == ["57.3", "1"]
    assert re.search(r"^ +4  Slurm cannot tell: jobs without a time limit", shown, re.MULTILINE)
    assert re.search(r"^ +8  allocation failure: Requested node configu", shown, re.MULTILINE)
    (best,) = [line for line in lines if line.startswith("earliest end: ")]
    assert shlex.split(best.partition(": ")[2])[:4] == [
        "slurm/submit.sh", "--account=me too", "--nodes=1", "--time=8:00:00"
    ]  # fmt: skip
    assert shlex.split(best)[-2:] == ["--seed", "a b"]
    assert "forecast, without evaluations and saves; start-up 5m00s (assumed)" in shown
    assert "the global batch does not depend on the number of GPUs" in shown
    assert "Nothing was submitted" in shown
    assert all("--test-only" in call for call in table.calls.read_text().splitlines())


def test_without_a_known_speed_the_starts_are_shown_and_a_refused_batch_has_its_reason(table):
    table.options.write_text(OPTIONS.replace("h100:8", "8"))
    shown = table()
    assert re.search(
        r"^ +1  starts \d+-\d+-\d+ \d+:\d+, the speed is not known: name the GPU", shown, re.M
    )
    assert "earliest end" not in shown
    other = "sbatch: gres                : gres:lscratch:100\nsbatch: time "
    table.options.write_text(OPTIONS.replace("h100:8", "4").replace("sbatch: time ", other))
    shown = table()
    assert re.search(r"^ +1  starts .*, does not divide$", shown, re.MULTILINE)


def test_the_measured_speed_is_that_of_the_ranks_that_trained(table, tmp_path):
    run, began = tmp_path / "run", datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)
    starts = [  # the second one ended before training
        {"time": (began + datetime.timedelta(hours=hour)).isoformat(), "resumed_from": None,
         "launch": {"world_size": ranks}, "slurm": {"start_time": began.timestamp() - 7200}}
        for hour, ranks in ((0, 2), (2, 64))
    ]  # fmt: skip
    lines = [{"event": "started", "step": 0, "time": began.timestamp() + 60}]
    lines += [
        {"event": "train", "step": step, "time": began.timestamp() + 60 + 3 * step, "loss": 2.0}
        for step in range(1, 20)
    ]
    run.mkdir()
    (run / "provenance.json").write_text(json.dumps({"run_id": "r", "starts": starts}))
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    shown = table("H100-80GB")
    assert "3 s a step on 2 ranks (measured), in proportion on others" in shown
    assert "start-up 5m00s (assumed)" in shown, "the interactive job began two hours before"


def test_rows_of_different_global_batches_are_called_different_trainings(table):
    assert "All rows are the same training" in table("H100-80GB")
    tokens = "36,000,000 tokens"
    by_ranks = "{{sys.argv[-1][0]}}" + tokens
    assert tokens in DRY_RUN
    script = DRY_RUN.replace(tokens, by_ranks).replace(
        'print("12:00:00  run: ', 'print(f"12:00:00  run: '
    )
    table.script.write_text(script.format(run="runs/a"))
    shown = table("H100-80GB")
    assert "The rows are different trainings: give global_batch_size" in shown
    assert "All rows are the same training" not in shown


def test_a_finished_run_has_nothing_left(table):
    resumes = "a start would resume from {run}/checkpoint-300"
    assert resumes in DRY_RUN
    finished = DRY_RUN.replace(resumes, "{run} is finished: a start would have nothing to do")
    table.script.write_text(finished.format(run="runs/a"))
    shown = table("H100-80GB")
    assert re.search(r"^ +2  starts .*, nothing is left to train$", shown, re.MULTILINE)
    assert "earliest end" not in shown


def test_jobs_without_a_time_limit_or_with_gpus_in_total_are_refused(table):
    for old, new in (("time ", "tame "), ("1-00:00:00", "UNLIMITED"), ("gpus-per-node", "gpus")):
        table.options.write_text(OPTIONS.replace(old, new))
        with pytest.raises(ConfigurationError, match="one training with a --time limit and GPUs"):
            table()
    table.options.write_text(OPTIONS.replace("gpus-per-node       : h100:8", "oversubscribe : no"))
    with pytest.raises(ConfigurationError, match="the job asks for none: give --gpus-per-node"):
        table("H100-80GB")
