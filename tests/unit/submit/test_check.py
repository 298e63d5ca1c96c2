"""The check of a held job, by slurm/submit.sh: what it prints, and its refusals."""

import json
import os

import pytest
from launching import ROOT

from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.config.strategy import SUBMITTING
from utils.launch.ledger import Fault, record_faults
from utils.submit import check as checking
from utils.submit.limits import SlurmAnswers, check_request

# Recorded from Slurm 22.05: scontrol --oneliner show partition (the fields that count), sinfo.
PARTITIONS = """\
PartitionName=gpu QoS=N/A MaxNodes=UNLIMITED MaxTime=4-00:00:00 TotalNodes=8
PartitionName=short QoS=N/A MaxNodes=2 MaxTime=04:00:00 TotalNodes=4
PartitionName=special QoS=part MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=4
"""
MANY = "PartitionName=many QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED TotalNodes=4"
NODES = """\
gpu|64|515000|gpu:a100:4(S:0-1)|a100,ib
gpu|32+|257000+|gpu:v100:2|v100
many|128|515000|gpu:a100:4(S:0,2),gpu:h100:4|a100,h100
short|64|515000|gpu:a100:4|a100
"""
NEVER = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
# sacctmgr -nP show qos format=Name,Flags,MaxWall,MaxTRES,MaxTRESPU,GrpTRES
QOS = """\
normal||1-00:00:00|gres/gpu=8,node=4||
long|PartitionTimeLimit,OverPartQOS|7-00:00:00||cpu=128|
part|||node=1||gres/gpu:a100=1,gres/gpu=6
large|||cpu=1.50K||
"""
HOSTILE = ["a b", '"', "$(touch canary)", "", "a\nb", "--nodes=9", "*", "ü", "%JOB%"]
SHOWN = {
    "JobID": "7", "Name": "a b", "NumNodes": "2", "NumTasks": "2", "tres-per-node": "gres:gpu:2",
    "tres-per-task": "N/A", "tres-per-job": "N/A", "TimeLimit": "1:00:00", "Requeue": "1",
    "StdOut": "/tmp/%j.log", "Partition": "gpu", "QOS": "N/A", "MinMemory": "64G", "NumCPUs": "16",
    "cpus-per-task": "8", "MinTime": "0:00",
}  # fmt: skip


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return a function that checks a job whose fields in squeue are given."""
    monkeypatch.chdir(ROOT)
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "STOKER_"))]:
        monkeypatch.delenv(name)

    def call(
        *arguments: str, options=(), script="job.sh", head="", refusal="", nodes=NODES, **shown: str
    ) -> int:
        (tmp_path / script).write_text(f"#!/bin/bash\n#SBATCH {head}\n")
        fields = SHOWN | {name.replace("_", "-"): text for name, text in shown.items()}
        answer = b"".join(os.fsencode(text).ljust(checking.FIELD_BYTES) for text in fields.values())
        words = [*options, str(tmp_path / script), *arguments]
        names = ",".join(fields)
        slurm = [refusal, PARTITIONS, nodes, ""]
        given = [str(tmp_path), names, os.fsdecode(answer), *slurm, str(len(options)), *words]
        return checking.main(given)

    return call


def test_the_dry_run_gets_the_launch_and_the_job_is_reported(check, tmp_path, monkeypatch, capfd):
    script = tmp_path / "stand_in.py"  # in place of pretrain.py
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
    assert (environment["WORLD_SIZE"], environment["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert "RANK" not in environment
    assert (environment["ACCELERATE_USE_FSDP"], environment["FSDP_VERSION"]) == ("true", "2")
    assert environment[SUBMITTING] == "1"
    assert capfd.readouterr().out.splitlines() == [
        "job:     a b, 2 node(s) of 2 GPU(s), 2 process(es); strategy by "
        "accelerate_configs/fsdp2.yaml, by ACCELERATE_CONFIG=accelerate_configs/fsdp2.yaml",
        "limit:   1:00:00; Slurm's stop signal comes 300 s before it; a job that stopped is queued "
        "again and resumes",
        "WARNING  each start overwrites the log: add #SBATCH --open-mode=append to job.sh",
        "log:     /tmp/7.log",
    ]
    assert check(str(script), options=["--open-mode=append"]) == 0
    assert "overwrites" not in capfd.readouterr().out
    assert check(str(script), Requeue="0") == 0
    limit = capfd.readouterr().out.splitlines()[1]
    assert limit.startswith("limit:   1:00:00; no stop signal to the batch shell before it (add #")
    assert limit.endswith("a job that stopped is not queued again (--no-requeue, JobRequeue=0)")
    monkeypatch.setenv("CODE", "2")
    monkeypatch.setenv("ACCELERATE_CONFIG", "accelerate_configs/cpu.yaml")
    monkeypatch.setenv("STOKER_PROCESSES_PER_NODE", "3")
    assert check(str(script), NumNodes="1", NumTasks="1", tres_per_node="N/A") == 2
    environment = json.loads((tmp_path / "got.json").read_text())[1]
    assert (environment["WORLD_SIZE"], environment["ACCELERATE_USE_CPU"]) == ("3", "true")
    assert "1 node(s) of 3 process(es)" in capfd.readouterr().out


def test_a_new_job_is_told_which_of_its_nodes_failed_twice(check, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("STOKER_LEDGER", str(tmp_path / "nodes.jsonl"))
    sinfo = tmp_path / "bin" / "sinfo"  # n6 is in another partition
    sinfo.parent.mkdir()
    sinfo.write_text(
        '#!/bin/sh\ncase "$*" in *--partition=gpu*) printf "n7\\nn8\\nn9\\n" ;; esac\n'
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sinfo.parent}:{os.environ['PATH']}")
    script = tmp_path / "stand_in.py"  # in place of pretrain.py
    script.write_text("# parse_pretraining")
    for kind in ("hang", "lost", "lost"):
        record_faults([Fault(node, kind, f"rank on {node}") for node in ("n6", "n7", "n8")])
    record_faults([Fault("n9", "hang", "rank 1")])
    n7, n8 = "n7 (2 faults)", "n8 (2 faults)"

    def notes(*options: str) -> list[str]:
        assert check(str(script), options=options) == 0
        lines = capfd.readouterr().out.splitlines()
        return [line.split(maxsplit=1)[1] for line in lines if line.startswith("note:")]

    told, leaves = "in 7 days: python status.py --nodes", "before job.sh leaves them out"
    both = [f"{n7}, {n8} {told}", f"--exclude=n7,n8 {leaves}"]
    assert notes() == both
    assert notes("--exclude=n9") == [both[0], f"--exclude=n9,n7,n8 {leaves}"]
    assert notes("-x", "n[7-8]") == notes("--nodelist=n7") == notes("-w", "n7") == []
    assert notes("--exclude=n7") == [f"{n8} {told}", f"--exclude=n7,n8 {leaves}"]


def test_jobs_that_cannot_work_are_refused(check):
    for arguments, shown, message in [
        ([], {}, "no script given"),
        (["absent.py"], {}, r"no file absent\.py in .*repository's root"),
        (["--gpus-per-node=0", "x"], {}, r"--gpus-per-node=0 is no training.*before job\.sh"),
        (["python_code.py"], {}, r"no file python_code\.py"),
        (["python3.12", "pretrain.py"], {}, "python3.12 is no training script"),
        (["python", "pretrain.py"], {}, r"python is no training script: name it first.*without py"),
        (["pretrain.py"], {"script": "train_job.sh"}, "for one node, not 2: slurm/multinode_job"),
        (["pretrain.py"], {"script": "sweep_job.sh"}, "for one node, not 2: each point"),
        (["examples/demo_figures.py"], {}, "does not know --dry_run.*with sbatch"),
        (
            ["--time=9", "x"],
            {"refusal": NEVER, "tres_per_node": "gres:gpu:8"},
            "--time=9 is no tra",
        ),
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
        if shown.get("script") and "not 2" not in message:
            shown["NumNodes"] = "1"
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


def request(refusal="", partitions=PARTITIONS, qos=QOS, gpus=2, **shown: str) -> list[str]:
    job = SHOWN | {name.replace("_", "-"): text for name, text in shown.items()}
    return check_request(job, gpus, SlurmAnswers(refusal, partitions, NODES, qos))


def test_requests_that_slurm_can_never_satisfy_say_what_to_type():
    for shown, message in [
        ({"refusal": NEVER, "gpus": 8}, "Ask for at most --gpus-per-node=4. A node has: 64 cores"),
        ({"refusal": NEVER, "MinMemory": "0.6T"}, "at most --mem=515000M"),
        ({"refusal": NEVER, "cpus_per_task": "65"}, "at most --cpus-per-task=64"),
        ({"refusal": NEVER, "cpus_per_task": "N/A", "gpus": 8}, "at most --gpus-per-node=4"),
        ({"QOS": "large", "NumCPUs": "2K"}, "cpu=2048, but QOS large allows 1.50K"),
        ({"refusal": "too few nodes", "gpus": 5}, "Ask for at most --gpus-per-node=4"),
        ({"refusal": NEVER}, "Ask for less, or another --partition.*features v100"),
        ({"TimeLimit": "5-00:00:00"}, "partition gpu allows 4-00:00:00.*--time=4-00:00:00"),
        ({"TimeLimit": "UNLIMITED"}, "partition gpu allows 4-00:00:00"),
        ({"TimeLimit": "4-00:00:01", "Partition": "gpu,short"}, "partition short allows 04:00:00"),
        ({"NumNodes": "9"}, "9 nodes, but partition gpu allows 8: give --nodes=8"),
        ({"NumNodes": "3", "Partition": "short"}, "allows 2: give --nodes=2"),
        ({"QOS": "normal", "TimeLimit": "1-00:00:01"}, "QOS normal allows 1-00:00:00"),
        ({"QOS": "normal", "gpus": 5}, "gres/gpu=10, but QOS normal allows 8"),
        ({"QOS": "long", "NumCPUs": "129"}, r"cpu=129, but QOS long allows 128 \(MaxTRESPU"),
        ({"Partition": "special", "QOS": "normal", "gpus": 1}, "node=2, but QOS normal or part "),
    ]:
        with pytest.raises(UnfitClusterError, match=f"(?s){message}"):
            request(**shown)


def test_requests_that_could_work_are_not_refused():
    for shown in [
        {"TimeLimit": "4-00:00:00"},
        {"TimeLimit": "5-00:00:00", "MinTime": "10:00"},  # --time-min
        {"TimeLimit": "2-00:00:00", "Partition": "short,gpu"},
        {"TimeLimit": "6-00:00:00", "QOS": "long"},
        {"Partition": "special", "QOS": "long", "NumNodes": "1", "gpus": 6},
        {"Partition": "special", "TimeLimit": "UNLIMITED", "NumNodes": "1"},
        {"QOS": "normal", "gpus": 5, "qos": "normal|\n"},  # Slurm does not enforce the limits
        {"QOS": "large", "NumCPUs": "1.50K"},
    ]:
        assert request(**shown) == []
    for shown, note in [
        ({"partitions": ""}, "Slurm does not show the limits of partition gpu: not checked"),
        ({"QOS": "normal", "qos": "", "TimeLimit": "5-00:00:00"}, "sacctmgr does not show QOS nor"),
        ({"refusal": "too few nodes", "cpus_per_task": "65534"}, "Slurm cannot start this job now"),
        ({"refusal": "few", "Partition": "many", "partitions": MANY, "gpus": 8}, "Slurm cannot"),
        ({"refusal": "Job violates QOS policy"}, "Slurm cannot start this job now: Job violates"),
    ]:
        (said,) = request(**shown)
        assert said.startswith(note)


def test_a_job_without_gpus_that_would_train_on_gpus_is_refused(
    check, tmp_path, monkeypatch, capfd
):
    script = tmp_path / "stand_in.py"  # in place of pretrain.py
    script.write_text("# parse_pretraining")
    none = {"tres_per_node": "gres:gpu:0"}
    for processes in ("", "2"):
        monkeypatch.setenv("STOKER_PROCESSES_PER_NODE", processes)
        with pytest.raises(UnfitClusterError, match=r"put ACCELERATE_USE_CPU=true in front of"):
            check(str(script), **none)
    without_gres = "gpu|64|515000|(null)|gpu\n"
    assert check(str(script), nodes=without_gres, **none) == 0
    note = (
        "note:    STOKER_PROCESSES_PER_NODE=2 counts as GPUs, because Slurm counts none; to train"
    )
    assert note in capfd.readouterr().out
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert check(str(script), **none) == 0
    assert "note:" not in capfd.readouterr().out


def test_the_folder_of_the_log_is_made(tmp_path):
    checking.make_log_folder(f"{tmp_path}/logs/a/x.log")
    assert (tmp_path / "logs/a").is_dir()
    checking.make_log_folder(f"{tmp_path}/%u/x.log")
    assert not list(tmp_path.glob("%*"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"cannot be made.*--output=FILE"):
        checking.make_log_folder(f"{tmp_path}/file/x.log")


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
