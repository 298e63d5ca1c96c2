"""slurm/submit.sh hands in what was checked, word for word; what a check refuses before that."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from utils.config.errors import ConfigurationError
from utils.launch.slurm import REQUEST, request_from
from utils.submit import submit

ROOT = Path(__file__).parents[3]
HOSTILE = [
    "a b", "it's", '"', "$(touch canary)", "`touch canary`", "; touch canary", "&& touch canary",
    "| tee canary", "a\nb", "\t", "-rf", "--", "--nodes=9", "*", "?", "[a]", "~", "${HOME}", "\\",
    "!", "#", "ü", "\u202e", "", "%JOB%", "\\0", "x" * 5000,
]  # fmt: skip
STUBS = {
    # Stands for the check: leaves the words it was given, and what the check would leave.
    "python": """\
#!/bin/bash
printf '%s\\0' "$@" >"$STUBS/python.words"
printf '%s\\0' --array=1,2 '--comment=it is $(touch canary)' >"$4/options"
printf 'watch: %%JOB%% it'"'"'s $(touch canary) & \\\\ *\\n' >"$4/help"
exit "${STUB_CHECK:-0}"
""",
    "sbatch": """\
#!/bin/bash
printf '%s\\0' "$@" >"$STUBS/sbatch.words"
printf '%s' "$PWD" >"$STUBS/sbatch.directory"
echo "${STUB_ANSWER-Submitted batch job 123}"
exit "${STUB_SBATCH:-0}"
""",
}


@pytest.fixture
def stubs(tmp_path):
    """Call slurm/submit.sh where python and sbatch only note what they are given."""
    directory = tmp_path / "stubs"
    directory.mkdir()
    for name, text in STUBS.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)

    def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(directory), os.environ["PATH"]])
        environment = os.environ | {"PATH": path, "STUBS": str(directory)} | env
        return subprocess.run(
            [ROOT / "slurm/submit.sh", *words], cwd=tmp_path, env=environment, text=True,
            capture_output=True, timeout=60, check=False,
        )  # fmt: skip

    call.words = lambda program: (directory / f"{program}.words").read_text().split("\0")[:-1]
    call.ran = lambda program: (directory / f"{program}.words").exists()
    return call


def test_every_word_reaches_check_and_sbatch_as_it_is(stubs, tmp_path):
    words = ["-J", "a b", "job.sh", "pretrain.py", *HOSTILE]
    done = stubs(*words)
    assert (done.returncode, done.stdout) == (0, "Submitted batch job 123\n")
    module, directory, _facts, *checked = stubs.words("python")[1:]
    assert (module, directory) == ("utils.submit.submit", str(tmp_path))
    assert checked == words
    added = ["--array=1,2", "--comment=it is $(touch canary)"]
    assert stubs.words("sbatch") == [*added, *words]
    assert (tmp_path / "stubs/sbatch.directory").read_text() == str(tmp_path)
    assert done.stderr == "watch: 123 it's $(touch canary) & \\ *\n"
    assert not list(tmp_path.glob("canary"))
    assert not (ROOT / "canary").exists()


def test_only_a_check_hands_nothing_in(stubs):
    done = stubs("--check", "-N2", "job.sh")
    assert (done.returncode, done.stdout) == (0, "")
    assert "checked; not handed in" in done.stderr
    assert stubs.words("python")[4:] == ["-N2", "job.sh"]
    assert not stubs.ran("sbatch")


def test_a_refusal_keeps_its_code_and_hands_nothing_in(stubs):
    assert stubs("job.sh", STUB_CHECK="69").returncode == 69
    assert not stubs.ran("sbatch")


def test_sbatchs_own_code_passes_and_other_answers_too(stubs):
    assert stubs("job.sh", STUB_SBATCH="3").returncode == 3
    done = stubs("--parsable", "job.sh", STUB_ANSWER="77;cluster")
    assert done.stdout == "77;cluster\n"
    assert done.stderr.startswith("watch: 77 ")
    done = stubs("job.sh", STUB_ANSWER="sbatch: something else 12")
    assert (done.stdout, done.stderr) == ("sbatch: something else 12\n", "")


def test_help_and_no_words_at_all(stubs):
    assert "slurm/submit.sh --nodes=4" in stubs("--help").stdout
    assert stubs("--help").returncode == 0
    assert stubs().returncode == 2
    assert stubs("--check").returncode == 2


def test_no_python_is_said(tmp_path):
    for name in ("dirname", "env", "hostname", "mktemp", "rm", "bash"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(
        [ROOT / "slurm/submit.sh", "job.sh"], env={"PATH": str(tmp_path)}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 69
    assert "there is no python on PATH: activate the environment" in done.stderr


@pytest.fixture
def job_script(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "STOKER_"))]:
        monkeypatch.delenv(name)

    def write(name: str = "job.sh", head: str = "--gpus-per-node=2 --output=%x-%j.log") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n#SBATCH {head}\n")
        return str(path)

    return write


def check(tmp_path, *words: str) -> int:
    return submit.main([str(ROOT), str(tmp_path), *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "job.sh runs a script: give it one"),
        (["absent.py"], r"absent\.py cannot be read: No such file.*repository's root"),
        (["examples/readme_figures.py"], "does not know --dry_run.*sbatch itself"),
        (["pretrain.py", "--dry_run"], "would wait in the queue and then only check"),
        (["pretrain.py", "--dry_run=true"], "would wait in the queue and then only check"),
    ],
)
def test_scripts_that_a_dry_run_cannot_check(job_script, tmp_path, words, message):
    with pytest.raises(ConfigurationError, match=message):
        check(tmp_path, job_script(), *words)


def test_the_dry_run_is_told_of_launch_and_request(job_script, tmp_path, monkeypatch, capsys):
    """A script that stands for pretrain.py and shows what it got."""
    script = tmp_path / "stand_in.py"
    script.write_text(
        "import json, os, sys  # parse_pretraining\n"
        f"open({str(tmp_path / 'got.json')!r}, 'w').write(\n"
        "    json.dumps([sys.argv[1:], dict(os.environ)]))\n"
        "path = json.loads(os.environ['STOKER_REQUEST'])['facts_file']\n"
        "open(path, 'w').write(json.dumps({'output_dir': 'runs/a b'}))\n"
        "sys.exit(int(os.environ.get('CODE', '0')))\n"
    )
    monkeypatch.setenv("ACCELERATE_CONFIG", "accelerate_configs/fsdp2.yaml")
    monkeypatch.setenv("RANK", "5")  # of whatever this was started in
    command = ["-N2", "-Jname", job_script(), str(script), *HOSTILE]
    assert check(tmp_path, *command) == 0
    arguments, environment = json.loads((tmp_path / "got.json").read_text())
    assert arguments == [*HOSTILE, "--dry_run"]
    assert environment["WORLD_SIZE"] == "4"
    assert "RANK" not in environment
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    request = request_from({REQUEST: environment[REQUEST]})
    assert (request.nodes, request.processes, request.strategy) == (2, 4, "fsdp2")
    assert (tmp_path / "options").read_text() == ""
    assert (tmp_path / "help").read_text().splitlines() == [
        "watch:   squeue --job=%JOB%",
        "log:     name-%JOB%.log",
        "end it:  scancel %JOB%",
        "stop:    touch 'runs/a b/STOP'",
    ]
    monkeypatch.setenv("CODE", "2")
    (tmp_path / "options").unlink()
    assert check(tmp_path, *command) == 2
    assert not (tmp_path / "options").exists()


@pytest.mark.parametrize(
    ("export", "lost"),
    [
        ("--export=NONE", True),
        ("--export=HOME,PATH", True),
        ("--export=ALL,A=b", False),
        ("--export=ACCELERATE_CONFIG", False),
        ("--mem=1G", False),
    ],
)
def test_variables_that_the_job_will_not_see_are_named(
    job_script, tmp_path, monkeypatch, capsys, export, lost
):
    monkeypatch.setenv("ACCELERATE_CONFIG", "accelerate_configs/fsdp2.yaml")
    monkeypatch.setattr(submit, "_check_training", lambda *_: 0)
    check(tmp_path, export, job_script(), "pretrain.py")
    said = capsys.readouterr().err
    assert ("keeps ACCELERATE_CONFIG from the job" in said) == lost


def sweep_file(tmp_path) -> str:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        f"script: pretrain.py\noutput_dir: {tmp_path}/runs\ngrid: {{seed: [1, 2, 3]}}\n"
    )
    (tmp_path / "runs" / "seed=2" / "final").mkdir(parents=True)
    return str(file)


def test_a_sweeps_unfinished_points_are_handed_in(job_script, tmp_path, monkeypatch, capsys):
    sound = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(submit.subprocess, "run", lambda *_, **__: sound)
    script, file = job_script("sweep_job.sh", "-G1 --output=%x-%A_%a.log"), sweep_file(tmp_path)
    assert check(tmp_path, script, file) == 0
    assert (tmp_path / "options").read_text() == "--array=0,2\0"
    assert "2 of 3 points are left to run" in capsys.readouterr().err
    shown = (tmp_path / "help").read_text()
    assert "log:     sweep_job.sh-%JOB%_INDEX.log" in shown
    assert check(tmp_path, "--array=1", script, file) == 0  # the user's choice counts
    assert (tmp_path / "options").read_text() == ""
    with pytest.raises(ConfigurationError, match="there is no point 3"):
        check(tmp_path, "--array=0-3", script, file)
    with pytest.raises(ConfigurationError, match="takes one sweep file"):
        check(tmp_path, script, file, "--seed=3")


def test_nothing_is_handed_in_of_a_finished_sweep(job_script, tmp_path, capsys):
    script, file = job_script("sweep_job.sh", "-G1"), sweep_file(tmp_path)
    for seed in (1, 3):
        (tmp_path / "runs" / f"seed={seed}" / "final").mkdir(parents=True)
    assert check(tmp_path, script, file) == 0
    assert not (tmp_path / "options").exists()
    assert "all 3 points are finished, nothing is handed in" in capsys.readouterr().err


SWEEP_SCRIPT = """\
import os
import sys
from utils.config.errors import ConfigurationError

def main(argv):
    os.environ["LEFT"] = os.environ.get("LEFT", "") + "x"
    assert os.environ["LEFT"] == "x", "an earlier point changed the environment"
    print("12:00:00  as usual")
    print("12:00:00  WARNING  said by all")
    seed = next(word for word in argv if word.startswith("--seed="))
    if seed == "--seed=3":
        print("12:00:00  WARNING  said by one")
        raise ConfigurationError(["shared fault", "own fault"])
    if "--grave=true" in argv:
        raise ConfigurationError("shared fault")
"""


@pytest.fixture
def checked_sweep(job_script, tmp_path):
    job_script()

    def run(grave: str) -> tuple[list[str], list[str]]:
        from utils.submit.sweep import check_points, read_sweep

        (tmp_path / "script.py").write_text(SWEEP_SCRIPT)
        (tmp_path / "s.yaml").write_text(
            f"script: {tmp_path}/script.py\noutput_dir: r\nsettings: {{grave: {grave}}}\n"
            "grid: {seed: [1, 2, 3]}\n"
        )
        lines: list[str] = []
        with pytest.raises(ConfigurationError) as caught:
            check_points(read_sweep(str(tmp_path / "s.yaml")), lines.append)
        return lines, caught.value.problems

    return run


def test_all_points_are_dry_run_and_their_faults_named_once(checked_sweep):
    lines, problems = checked_sweep("true")
    assert lines == [
        "point 0: seed=1",
        "12:00:00  as usual",
        "12:00:00  WARNING  said by all",
        "point 1: seed=2",
        "point 2: seed=3",
        "12:00:00  WARNING  said by one",
    ]
    assert problems == ["every point: shared fault", "point 2 (seed=3): own fault"]
    assert checked_sweep("false")[1] == [
        "point 2 (seed=3): shared fault",
        "point 2 (seed=3): own fault",
    ]


@pytest.mark.parametrize(
    ("words", "task", "message"),
    [
        (["a b.yaml"], "", r"a sweep is a job array: slurm/submit.sh slurm/sweep_job.sh a\ b.yaml"),
        ([], "0", "usage: sbatch --array=0-N slurm/sweep_job.sh"),
        (["a", "b"], "0", "usage: sbatch --array=0-N slurm/sweep_job.sh"),
        (["$(touch canary)"], "0", "$(touch canary): cannot read the sweep: No such file"),
        (
            ["recipes/sweep/demo_cpu.yaml"],
            "3",
            "has 3 points, numbered from 0: there is no point 3",
        ),
    ],
)
def test_sweep_job_refuses_before_anything_starts(words, task, message):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "SLURM_ARRAY_TASK_ID": task}
    done = subprocess.run(
        [ROOT / "slurm/sweep_job.sh", *words], cwd=ROOT, env=environment, text=True,
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert "job script" not in done.stderr, "it came as far as slurm/job_setup.sh"
    assert not (ROOT / "canary").exists()
