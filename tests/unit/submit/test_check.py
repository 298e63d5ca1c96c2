"""slurm/submit.sh holds a job, checks it, and releases or cancels it; the check's refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

from utils.config.errors import ConfigurationError
from utils.config.strategy import SUBMITTING
from utils.submit import check as checking

HOSTILE = ["a b", '"', "$(touch canary)", "", "a\nb", "--nodes=9", "*", "ü", "%JOB%"]
# Each command records its arguments. python and sbatch end with the exit codes of the test.
STUB = """\
#!/bin/bash
name=${0##*/}
printf '%s\\0' "$@" >"$STUBS/$name.words"
printf '%s\\n' "$name ${1-}" >>"$STUBS/calls"
case $name in
sbatch)
    printf %s "$STOKER_ROOT" >"$STUBS/root"
    [[ -z $SBATCH_ANSWER ]] || echo "$SBATCH_ANSWER"
    exit "$SBATCH_CODE" ;;
python)
    [[ $3 != points ]] || printf '0\\ta=1\\n1\\ta=2\\tfinished\\n2\\ta=3\\n'
    exit "$PYTHON_CODE" ;;
esac
"""
ENDINGS = {"SBATCH_ANSWER": "123", "SBATCH_CODE": "0", "PYTHON_CODE": "0"}


@pytest.fixture
def stubs(tmp_path):
    """Return a function that calls slurm/submit.sh with commands that only record arguments."""
    directory = tmp_path / "stubs"
    directory.mkdir()
    for name in ("python", "sbatch", "squeue", "scontrol", "scancel"):
        (directory / name).write_text(STUB)
        (directory / name).chmod(0o755)
    for name in ("job.sh", "sweep_job.sh"):
        (tmp_path / name).write_text("#!/bin/bash\n")

    def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        (directory / "calls").unlink(missing_ok=True)
        path = os.pathsep.join([str(directory), os.environ["PATH"]])
        environment = os.environ | {"PATH": path, "STUBS": str(directory)} | ENDINGS | env
        return subprocess.run(
            [ROOT / "slurm/submit.sh", *words], cwd=tmp_path, env=environment, text=True,
            capture_output=True, timeout=600, check=False,
        )  # fmt: skip

    call.words = lambda program: (directory / f"{program}.words").read_text().split("\0")[:-1]
    call.calls = lambda: [line.split() for line in (directory / "calls").read_text().splitlines()]
    return call


def test_submit_passes_every_word_and_the_options_of_sbatch_keep_their_meaning(stubs, tmp_path):
    words = ["-J", "a b", "job.sh", "pretrain.py", *HOSTILE]
    done = stubs(*words)
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 123\n")
    assert [call[0] for call in stubs.calls()] == ["sbatch", "squeue", "python", "scontrol"]
    assert stubs.words("sbatch") == ["--hold", "--parsable", *words]
    assert stubs.words("python")[5:] == ["2", *words]
    assert (tmp_path / "stubs/root").read_text() == str(ROOT), "where the job looks for it"
    assert stubs("--parsable", "job.sh").stdout == "123\n"
    assert stubs("--check", "job.sh").stdout == ""
    assert stubs.calls()[-1] == ["scancel", "123"]
    done = stubs("job.sh", SBATCH_ANSWER="77;far")
    assert done.stdout == "Submitted batch job 77\n"
    assert stubs.words("scontrol") == ["--clusters=far", "release", "77"]
    # sbatch's own refusal, and --test-only, which makes no job.
    for code in (3, 0):
        done = stubs("job.sh", SBATCH_ANSWER="", SBATCH_CODE=str(code))
        assert (done.returncode, done.stdout) == (code, "")
        assert [call[0] for call in stubs.calls()] == ["sbatch"]
    stubs("sweep_job.sh", "a b.yaml")  # an array of the unfinished points
    assert stubs.words("sbatch")[2:] == ["--array=0,2", "sweep_job.sh", "a b.yaml"]
    stubs("sweep_job.sh", "s.yaml", SBATCH_ARRAY_INX="1")
    assert "--array=0,2" not in stubs.words("sbatch")
    assert "slurm/submit.sh --nodes=4" in stubs("--help").stdout
    for words in ([], ["--check"], ["-N2"], ["--wrap=hostname"]):
        done = stubs(*words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "slurm/submit.sh" in done.stderr


SHOWN = {
    "JobID": "7", "Name": "a b", "NumNodes": "2", "NumTasks": "2", "tres-per-node": "gres:gpu:2",
    "tres-per-task": "N/A", "tres-per-job": "N/A", "TimeLimit": "1:00:00", "Requeue": "1",
    "StdOut": "/x/%j.log",
}  # fmt: skip


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks a job whose fields in squeue are given."""
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "STOKER_"))]:
        monkeypatch.delenv(name)

    def call(*arguments: str, options=(), script="job.sh", head="", **shown: str) -> int:
        (tmp_path / script).write_text(f"#!/bin/bash\n#SBATCH {head}\n")
        fields = SHOWN | {name.replace("_", "-"): text for name, text in shown.items()}
        answer = b"".join(os.fsencode(text).ljust(checking.WIDTH) for text in fields.values())
        words = [*options, str(tmp_path / script), *arguments]
        names = ",".join(fields)
        return checking.main([str(tmp_path), names, os.fsdecode(answer), str(len(options)), *words])

    return call


def test_the_dry_run_gets_the_launch_and_the_job_is_reported(check, tmp_path, monkeypatch, capfd):
    script = tmp_path / "stand_in.py"  # stands in for pretrain.py
    script.write_text(
        "import json, os, sys  # parse_pretraining\n"
        f"open({str(tmp_path / 'got.json')!r}, 'w').write(\n"
        "    json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        "sys.exit(int(os.environ.get('CODE', '0')))\n"
    )
    monkeypatch.setenv("ACCELERATE_CONFIG", "accelerate_configs/fsdp2.yaml")
    monkeypatch.setenv("RANK", "5")  # from an outer launch
    head = "--nodes=2 --signal=B:USR1@300 # ours"
    assert check(str(script), *HOSTILE, head=head) == 0
    arguments, environment = json.loads((tmp_path / "got.json").read_text())
    assert arguments == [*HOSTILE, "--dry_run"]
    assert environment["WORLD_SIZE"] == "4"
    assert "RANK" not in environment
    assert (environment["ACCELERATE_USE_FSDP"], environment["FSDP_VERSION"]) == ("true", "2")
    assert environment[SUBMITTING] == "1"
    assert capfd.readouterr().out.splitlines() == [
        "log:     /x/7.log",
        "job:     a b, 2 node(s) of 2 GPU(s), 2 process(es); strategy by "
        "accelerate_configs/fsdp2.yaml, by ACCELERATE_CONFIG=accelerate_configs/fsdp2.yaml",
        "limit:   1:00:00; Slurm's stop signal comes 300 s before it; a job that stopped is queued "
        "again and resumes",
    ]
    assert check(str(script), Requeue="0") == 0
    limit = capfd.readouterr().out.splitlines()[2]
    assert limit.startswith("limit:   1:00:00; no stop signal to the batch shell before it (add #")
    assert limit.endswith("a job that stopped is not queued again (--no-requeue, JobRequeue=0)")
    monkeypatch.setenv("CODE", "2")
    monkeypatch.setenv("ACCELERATE_CONFIG", "accelerate_configs/cpu.yaml")
    monkeypatch.setenv("STOKER_PROCESSES_PER_NODE", "3")
    assert check(str(script), NumNodes="1", NumTasks="1", tres_per_node="N/A") == 2
    environment = json.loads((tmp_path / "got.json").read_text())[1]
    assert (environment["WORLD_SIZE"], environment["ACCELERATE_USE_CPU"]) == ("3", "true")
    assert "1 node(s) of 3 process(es)" in capfd.readouterr().out


def test_jobs_that_cannot_work_are_refused(check):
    for arguments, shown, message in [
        ([], {}, "no script given"),
        (["absent.py"], {}, r"no file absent\.py.*repository's root"),
        (["examples/demo_figures.py"], {}, "does not know --dry_run.*with sbatch"),
        (["pretrain.py"], {"NumTasks": "8"}, "8 tasks on 2 node.*--ntasks-per-node=1"),
        (
            ["pretrain.py"],
            {"options": ["--signal=B:USR1@3600"]},
            "limit is 1:00:00.*stop as it starts",
        ),
        (["a.yaml", "--seed=3"], {"script": "sweep_job.sh"}, "takes one sweep file"),
        (["--sources", "x"], {"script": "prepare_job.sh"}, "output_dir.*required"),
        (
            ["--sources", "lab/absent", "--tokenizer_name_or_path", "x", "--output_dir", "x"],
            {"script": "prepare_job.sh"},
            "lab/absent: no such local path.*not in the cache.*--offline_dir",
        ),
    ]:
        with pytest.raises(ConfigurationError, match=f"(?s){message}") as caught:
            check(*arguments, **shown)
        assert caught.value.exit_code == 2


def test_gpus_are_read_however_they_were_asked_for():
    for shown, gpus in [
        ({"tres-per-node": "gres:gpu:1,gres:gpu:h100:4"}, 4),  # of an #SBATCH line, then of --gres
        ({"tres-per-node": "gres/gpu:a100:8(S:0)"}, 8),
        ({"tres-per-node": "gres:gpu,license:3"}, 1),
        ({"tres-per-node": "N/A"}, 0),
    ]:
        assert checking.gpus_per_node(SHOWN | shown) == gpus


def test_times_and_signals(tmp_path, monkeypatch):
    times = {"1:30": 90, "1:02:03": 3723, "1-02:04:00": 93_840, "UNLIMITED": None}
    assert {text: checking.time_limit_s(text) for text in times} == times
    leads = {"B:USR1@300": 300, "RB:SIGUSR1@5": 5, "B:10": 60, "USR1@300": None, "B:TERM": None}
    script = tmp_path / "job.sh"
    script.write_text("#SBATCH --signal=B:USR1@7\n")
    found = {text: checking.signal_lead_s(["--signal", text], script) for text in leads}
    assert found == leads
    monkeypatch.delenv("SBATCH_SIGNAL", raising=False)
    assert checking.signal_lead_s([], script) == 7
    monkeypatch.setenv("SBATCH_SIGNAL", "B:USR1@8")
    assert checking.signal_lead_s([], script) == 8


def test_sweep_job_refuses_before_anything_starts():
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for words, task, message in [
        (["a b.yaml"], "", r"a sweep is a job array: slurm/submit.sh slurm/sweep_job.sh a\ b.yaml"),
        (["a", "b"], "0", "usage: sbatch --array=0-N slurm/sweep_job.sh"),
        (["$(touch canary)"], "0", "$(touch canary): cannot be read: No such file"),
    ]:
        environment = os.environ | {"PATH": path, "SLURM_ARRAY_TASK_ID": task}
        done = subprocess.run(
            [ROOT / "slurm/sweep_job.sh", *words], cwd=ROOT, env=environment, text=True,
            capture_output=True, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert message in done.stderr
        assert "job script" not in done.stderr, "it came as far as slurm/job_setup.sh"
