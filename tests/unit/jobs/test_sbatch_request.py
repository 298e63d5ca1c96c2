"""An sbatch request is read as sbatch reads it; tests/slurm/test_submit.py asks the real one."""

from pathlib import Path

import pytest

from utils.config.errors import ConfigurationError
from utils.submit.submit import (
    array_indices,
    gpus_of_gres,
    read_request,
    read_submission,
    read_words,
    stop_signal_of,
    time_limit_s,
)

HEAD = """\
#!/bin/bash
# A comment.
#SBATCH --job-name=my_job   # what squeue shows
#SBATCH --nodes=2 --ntasks-per-node=1  #it's "enough" \\
##SBATCH --nodes=7
#SBATCH --gpus-per-node=4

#SBATCH -t 01:00:00
#SBATCH --output="logs/%x %j.log"
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
echo started
#SBATCH --time=5
"""


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    """The default accelerate configs are named from there."""
    monkeypatch.chdir(Path(__file__).parents[3])


@pytest.fixture
def job_script(tmp_path):
    def write(head: str = HEAD) -> str:
        path = tmp_path / "job.sh"
        path.write_text(head)
        return str(path)

    return write


def request(words, environment=None):
    return read_request(read_submission(words, environment or {}), environment or {})[0]


def test_the_head_is_read_up_to_the_first_command(job_script):
    read = request([job_script(), "pretrain.py"])
    assert (read.nodes, read.gpus_per_node, read.processes, read.tasks_per_node) == (2, 4, 8, 1)
    assert read.time_limit_s == 3600
    assert (read.job_name, read.log, read.requeue) == ("my_job", "logs/%x %j.log", True)
    assert read.signal == stop_signal_of("B:USR1@300")
    assert read.sources["time"].endswith("job.sh:8")
    assert (read.strategy, read.strategy_file) == ("ddp", "accelerate_configs/multi_gpu.yaml")


@pytest.mark.parametrize(
    ("words", "nodes", "gpus", "limit_s"),
    [
        (["-N4"], 4, 4, 3600),
        (["-N", "4"], 4, 4, 3600),
        (["--nodes=4"], 4, 4, 3600),
        (["--nodes", "3", "--nodes", "4"], 4, 4, 3600),
        (["-N1k"], 1024, 4, 3600),
        (["-HN", "1"], 1, 4, 3600),
        (["-Qvt5"], 2, 4, 300),
        (["-t", "2-12"], 2, 4, 216_000),
        (["--gres=gpu:h100:2"], 2, 2, 3600),
        (["--gres", "gpu:1,tmpfs:1G"], 2, 1, 3600),
        (["--gres=gpu"], 2, 1, 3600),
        (["--gres=tmpfs:1G"], 2, 4, 3600),
        (["--gpus-per-node=h100:8"], 2, 8, 3600),
        (["--gpus-per-nod=8"], 2, 8, 3600),
        (["--gpus-per-node=0", "--gpus-per-task=2"], 2, 2, 3600),
        (["--gpus-per-node=0", "-G", "6"], 2, 3, 3600),
        (["--gres=gpu:0"], 2, 4, 3600),
        (["--exclusive", "-k", "--nice", "--mem=0", "--propagate=ALL"], 2, 4, 3600),
        (["--some-new-option=3", "--another"], 2, 4, 3600),
        (["--comment", "--nodes=9"], 2, 4, 3600),
        (["--"], 2, 4, 3600),
    ],
    ids=str,
)
def test_spellings_of_the_command_line(job_script, words, nodes, gpus, limit_s):
    script = job_script()
    submission = read_submission([*words, script, "pretrain.py", "--nodes=99", "-N", "98"], {})
    assert (submission.job_script, submission.arguments[0]) == (script, "pretrain.py")
    read = read_request(submission, {})[0]
    assert (read.nodes, read.gpus_per_node, read.time_limit_s) == (nodes, gpus, limit_s)


@pytest.mark.parametrize(
    ("head", "nodes", "gpus"),
    [
        ("--nodes=2 --gpus-per-task=3 --ntasks-per-node=1", 2, 3),
        ("--nodes=2 --gpus=6", 2, 3),
        ("-G a100:2,v100:2 -N 2", 2, 2),
        ("--ntasks=3 --ntasks-per-node=1 --gpus-per-node=1", 3, 1),
        ("--gpus-per-node=1", 1, 1),
    ],
)
def test_other_ways_to_ask_for_gpus_and_nodes(job_script, head, nodes, gpus):
    read = request([job_script(f"#!/bin/sh\n#SBATCH {head}\n"), "pretrain.py"])
    assert (read.nodes, read.gpus_per_node) == (nodes, gpus)


def test_the_environment_wins_over_the_head_and_the_command_line_over_both(job_script):
    environment = {"SBATCH_TIMELIMIT": "7", "SBATCH_NO_REQUEUE": "", "SBATCH_SIGNAL": "TERM@20"}
    read = request([job_script(), "x"], environment)
    assert (read.time_limit_s, read.requeue) == (420, False)
    assert read.signal == stop_signal_of("TERM@20")
    assert read.sources["time"] == "SBATCH_TIMELIMIT"
    read = request(["-t9", "--requeue", job_script(), "x"], environment)
    assert (read.time_limit_s, read.requeue, read.sources["time"]) == (540, True, "-t9")
    assert request([job_script(), "x"], {"SBATCH_NO_REQUEUE": "0"}).requeue is True


def test_the_log_of_a_job_without_output_is_slurms(job_script):
    assert request([job_script("#!/bin/sh\n#SBATCH -G 1\n"), "x"]).log == "slurm-%j.out"
    read = request(["-a0-3", job_script("#!/bin/sh\n#SBATCH -G 1\n"), "x"])
    assert (read.log, read.job_name) == ("slurm-%A_%a.out", "job.sh")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-N", "2-4"], r"-N 2-4: a range lets Slurm choose.*--nodes=2 or --nodes=4"),
        (["--nodes=0"], "--nodes=0: expected a number of at least 1"),
        (["--nodes=two"], "--nodes=two: expected one number of nodes"),
        (["--time=1:2:3:4"], "--time=1:2:3:4: no time in Slurm's formats"),
        (["--signal=B:USR9@3"], "there is no signal USR9"),
        (["--signal=300@USR1"], "expected"),
        (["--array=0-3%x"], "expected a number after %"),
        (["--array=a-b"], "expected numbers and ranges"),
        (["--gpus-per-node=0"], "asks for no GPUs: add --gpus-per-node=N.*ACCELERATE_USE_CPU"),
        (["--gpus-per-node=many"], "expected a number of GPUs"),
        (["--no=1"], "--no may be --nodefile or --nodelist or --nodes"),
        (["-Z"], "no option -Z"),
        (["--wrap=hostname"], "--wrap hands in a command"),
        ([":"], "heterogeneous"),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_refused(job_script, words, message):
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        request([*words, job_script(), "pretrain.py"])


def test_all_faults_of_a_request_are_named_at_once(job_script):
    with pytest.raises(ConfigurationError) as caught:
        request(["-N1-2", "-t", "x", "--signal=@", job_script(), "pretrain.py"])
    assert len(caught.value.problems) == 3


def test_gpus_that_do_not_divide_are_refused(job_script):
    head = "#!/bin/sh\n#SBATCH --gpus=3 --nodes=2\n"
    with pytest.raises(ConfigurationError, match="3 GPUs do not divide over 2 nodes"):
        request([job_script(head), "x"])


def test_no_job_script_and_none_that_can_be_read(tmp_path):
    with pytest.raises(ConfigurationError, match="no job script"):
        read_submission(["--nodes=2"], {})
    with pytest.raises(ConfigurationError, match="-N is the last word, but needs a value"):
        read_submission(["-N"], {})
    with pytest.raises(ConfigurationError, match=r"absent\.sh cannot be read: No such file"):
        read_submission([str(tmp_path / "absent.sh")], {})


def test_a_head_that_sbatch_would_refuse(job_script):
    with pytest.raises(ConfigurationError, match=r"job\.sh:2: stray is no option"):
        request([job_script("#!/bin/sh\n#SBATCH --nodes=2 stray\n"), "x"])
    with pytest.raises(ConfigurationError, match=r"job\.sh:2: a quote is not closed: 'a"):
        request([job_script("#!/bin/sh\n#SBATCH --comment='a\n"), "x"])


def test_cpu_runs_take_their_processes_from_the_user(job_script):
    script = job_script("#!/bin/sh\n#SBATCH --nodes=2\n")
    cpu = {"ACCELERATE_USE_CPU": "true"}
    read = request([script, "x"], cpu | {"STOKER_PROCESSES_PER_NODE": "2"})
    assert (read.processes, read.gpus_per_node) == (4, 0)
    assert read.strategy_file == "accelerate_configs/cpu.yaml"
    assert request([script, "x"], cpu).processes == 2
    assert request([script, "x"], {"STOKER_PROCESSES_PER_NODE": "8"}).processes == 16
    with pytest.raises(ConfigurationError, match="'many': expected a number of at least 1"):
        request([script, "x"], cpu | {"STOKER_PROCESSES_PER_NODE": "many"})
    with pytest.raises(ConfigurationError, match="is 3, but the job asks for 4 GPUs a node"):
        request([job_script(), "x"], {"STOKER_PROCESSES_PER_NODE": "3"})


def test_a_request_survives_its_way_through_the_environment(job_script):
    from utils.launch.slurm import REQUEST, request_from

    read = request(["-a0-3", job_script(), "x"])
    assert request_from({REQUEST: read.to_json()}) == read
    assert request_from({}) is None
    with pytest.raises(ConfigurationError, match="STOKER_REQUEST is not a request"):
        request_from({REQUEST: "{}"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400), ("1:30", 120), ("0:01", 60), ("1:2:3", 3780), ("1-2", 93_600),
        ("1-2:3", 93_780), ("1-2:3:4", 93_840), ("UNLIMITED", 0), ("infinite", 0), ("-1", 0),
    ],
)  # fmt: skip
def test_time_limits(text, seconds):
    assert time_limit_s(text) == seconds


def test_signals():
    assert stop_signal_of("B:USR1@300").stops_the_run
    assert stop_signal_of("RB:SIGUSR1@300").stops_the_run
    assert stop_signal_of("B:10").lead_s == 60
    assert stop_signal_of("B:10").stops_the_run
    assert not stop_signal_of("USR1@300").stops_the_run
    assert not stop_signal_of("B:TERM@300").stops_the_run


def test_arrays_and_gres():
    assert array_indices("0-3%2") == (0, 1, 2, 3)
    assert array_indices("1,5-9:2") == (1, 5, 7, 9)
    assert gpus_of_gres("gpu:a100:2,gpu:v100:1,license:3") == 3
    assert gpus_of_gres("gres:gpu:2") == 2
    assert gpus_of_gres("gpu:h100") == 1
    assert gpus_of_gres("gpu:2(S:0)") == 2
    assert gpus_of_gres("gpu:1,gpu:2") == 2
    assert gpus_of_gres("none") is None


def test_words_after_the_script_are_the_scripts():
    assert read_words(["-N2", "job.sh", "-N3"])[1] == ["job.sh", "-N3"]
    assert read_words(["--", "-odd.sh"])[1] == ["-odd.sh"]
