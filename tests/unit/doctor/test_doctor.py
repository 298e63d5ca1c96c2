"""The doctor on simulated machines: each fault becomes a line with advice, not an exception."""

import shutil
import threading
from types import SimpleNamespace

import pytest
import torch

from utils.doctor import __main__ as doctor
from utils.doctor.__main__ import CheckResult

SECRETS = {"HF_TOKEN": "hf_" + "q" * 30, "WANDB_API_KEY": "wandb-secret-value"}


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """Simulate a machine without network, GPU and Slurm. HF_HOME and repository are temporary."""
    from huggingface_hub import constants

    monkeypatch.setattr(doctor, "hub_fault", lambda: "URL cannot be reached (ConnectError)")
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in (*SECRETS, "HF_WRITE_TOKEN", "SLURM_JOB_ID", "CXX", "CC"):
        monkeypatch.setenv(name, "")  # not deleted, so that monkeypatch undoes values from .env
    (tmp_path / "root/slurm").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    shutil.copy(doctor.ROOT / "pyproject.toml", tmp_path / "root")
    monkeypatch.setattr(doctor, "ROOT", tmp_path / "root")
    stubs = tmp_path / "bin"
    stubs.mkdir()
    for name in ("bash", "sh"):
        (stubs / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(stubs))
    return tmp_path


def stub(folder, name, text="", code=0, command=""):
    path = folder / "bin" / name
    path.write_text(f"#!/bin/sh\nprintf '%b' '{text}'\n{command}\nexit {code}\n")
    path.chmod(0o755)


def lines_of(check, *arguments):
    return [f"{level} {what} -> {mend}" for level, what, mend in check(*arguments)]


def with_gpu(monkeypatch, capability=(9, 0), free=70):
    gpu = SimpleNamespace(name="NVIDIA H100", major=capability[0], minor=capability[1])
    for name, value in {
        "is_available": True, "device_count": 1, "get_arch_list": ["sm_75", "sm_90"],
        "get_device_capability": capability,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.version, "cuda", "12.9")


def test_a_laptop_can_train_and_no_secret_is_shown(alone, monkeypatch, capsys):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "LIMIT_S", 600.0)  # enough for a loaded machine
    assert doctor.main(["--output_dir", str(alone / "runs/deep")]) == 0
    out = capsys.readouterr().out
    for part in (
        "packages are as pyproject.toml has them", "no GPU here: training is on the CPU",
        "attention here: auto takes per-document SDPA", "no g++ here", "no Slurm here", "no .env",
        "URL cannot be reached (ConnectError)", "HF_HOME", "core(s) and ",
        "output_dir", "0 missing", "0 not known",
    ):  # fmt: skip
        assert part in out, part
    assert "could not be checked" not in out
    assert not [value for value in SECRETS.values() if value in out]
    assert not (alone / "runs").exists(), "nothing is left behind"


def test_a_check_that_fails_or_hangs_is_a_line():
    def failing():
        yield CheckResult("ok", "before")
        raise ValueError("disk\nis gone")

    found = doctor.RunningCheck("it", failing).wait(600)
    assert [line[:2] for line in found] == [
        ("ok", "before"), ("unknown", "it could not be checked (ValueError: disk)"),
    ]  # fmt: skip
    hangs = threading.Event()
    assert "it: still running" in doctor.RunningCheck("it", hangs.wait).wait(0.2)[0].what
    hangs.set()


def test_a_slow_check_is_waited_for_while_the_others_run(alone, monkeypatch, capsys):
    """Each check waits for the one that is started after it, so in turn none would end."""
    events = [threading.Event() for _ in range(7)]

    def stage(number):
        def check():
            events[number].set()
            if number + 1 < len(events):
                events[number + 1].wait(600)
            yield CheckResult("ok", f"check {number}")

        return check

    names = ["python", "gpus", "kernels", "host", "slurm", "tokens", "disk"]
    for number, name in enumerate(names):
        check = stage(number)
        monkeypatch.setattr(doctor, f"check_{name}", lambda *_, check=check: check())
    monkeypatch.setattr(doctor, "check_hub", lambda: iter(()))
    monkeypatch.setattr(doctor, "WAIT_LINE_AFTER_S", 0.0)
    monkeypatch.setattr(doctor, "LIMIT_S", 600.0)
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("ok")] == [
        f"ok       check {number}" for number in range(7)
    ]
    assert "0 not known" in shown


def test_gpus_are_compared_with_driver_and_torch(alone, monkeypatch):
    stub(alone, "srun")
    assert doctor.INTERACTIVE in lines_of(doctor.check_gpus)[0]
    stub(alone, "nvidia-smi", "NVIDIA H100\\nNVIDIA A100")
    for cuda, built in ((None, "built for CPUs"), ("13.0", "built for CUDA 13.0")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        (line,) = lines_of(doctor.check_gpus)
        assert line.startswith("missing torch")
        assert f"{built}, cannot use NVIDIA H100, NVIDIA A100" in line
    with_gpu(monkeypatch)
    torch_line, gpu = lines_of(doctor.check_gpus)
    assert "built for CUDA 12.9" in torch_line
    assert gpu.startswith("ok GPU 0: NVIDIA H100, 80 GiB, 70 free, compute capability 9.0, bf16")
    for capability, free, part in (
        ((7, 5), 70, "70 free, compute capability 7.5: no bf16"),
        ((7, 0), 70, "missing"), ((9, 0), 3, "another process uses it"),
    ):  # fmt: skip
        with_gpu(monkeypatch, capability, free)
        assert part in lines_of(doctor.check_gpus)[1]


def test_packages_out_of_range_and_missing_ones_are_named_with_the_command(alone, monkeypatch):
    versions = {"torch": "2.4.0", "deepspeed": "0.1", "packaging": "26"}

    def version(name):
        if name not in versions:
            raise doctor.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.metadata, "version", version)
    text = "\n".join(lines_of(doctor.check_python))
    assert "warning torch 2.4.0 is outside of" in text
    assert "missing trl is not installed -> pip install 'trl>=" in text
    assert "option bitsandbytes is not installed: load_in_4bit" in text
    assert "warning deepspeed 0.1 is outside of " in text


def test_the_doctor_repeats_sinfo(alone):
    assert "no Slurm here" in lines_of(doctor.check_slurm)[0]
    stub(alone, "sbatch")
    stub(alone, "sinfo", "gpu* up 1-00:00:00 4 idle gpu:h100:8\\n")
    cluster, line = lines_of(doctor.check_slurm)
    assert "cp slurm/cluster.env.example" in cluster
    assert line.startswith("ok Slurm's partitions (limit, nodes, state, GPUs): gpu* up 1-00")
    down = "gpu* up 1-00:00:00 4 idle* gpu:8\\ncpu up 1-00 4 drain x\\nold down 1-00 4 idle x\\n"
    stub(alone, "sinfo", down)
    line = lines_of(doctor.check_slurm)[1]
    assert line.startswith(
        "warning no partition of Slurm runs jobs now: gpu* up 1-00:00:00 4 idle*"
    )
    stub(alone, "sinfo", down + "gpu* up 1-00:00:00 4 mix~ gpu:8\\n")
    assert lines_of(doctor.check_slurm)[1].endswith("GPUs): gpu* up 1-00:00:00 4 mix~ gpu:8 -> ")
    (alone / "root/slurm/cluster.env").touch()
    assert lines_of(doctor.check_slurm)[0].startswith("ok slurm/cluster.env")
    stub(alone, "sinfo", code=1)
    found = doctor.RunningCheck("Slurm", doctor.check_slurm).wait(600)
    assert [finding.level for finding in found] == ["ok", "unknown"]


def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(alone):
    stub(alone, "nvidia-smi", "failed: cannot communicate with the driver", code=9)
    (finding,) = doctor.RunningCheck("GPUs", doctor.check_gpus).wait(600)
    assert finding.level == "unknown"
    assert "nvidia-smi" in finding.what
    stub(alone, "nvidia-smi", "No devices were found")
    assert "no GPU here: training is on the CPU" in lines_of(doctor.check_gpus)[0]


def test_a_readable_env_file_is_missing_its_mode_and_a_private_one_is_read(alone, monkeypatch):
    env = alone / "root/.env"
    env.write_text(f"HF_TOKEN={SECRETS['HF_TOKEN']}\n")
    env.chmod(0o644)
    line = lines_of(doctor.check_tokens)[0]
    assert line.startswith("missing")
    assert line.endswith(f"chmod 600 {env}")
    env.chmod(0o600)
    line = lines_of(doctor.check_tokens)[0]
    assert line.startswith("ok .env has HF_TOKEN")
    assert SECRETS["HF_TOKEN"] not in line


def test_the_hub_is_reached_or_not(alone, monkeypatch):
    import huggingface_hub
    from huggingface_hub import constants

    assert "warning the Hub: URL cannot" in lines_of(doctor.check_hub)[1]
    monkeypatch.setattr(doctor, "hub_fault", lambda: "")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "is reached; no token: gated models need one" in lines_of(doctor.check_hub)[1]
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: SECRETS["HF_TOKEN"])
    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", lambda _: {"name": "ada"})
    assert lines_of(doctor.check_hub)[1:] == [f"ok {constants.ENDPOINT} is reached -> "]

    def refused(self):
        error = OSError(SECRETS["HF_TOKEN"])
        error.response = SimpleNamespace(status_code=401)
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "whoami", refused)
    line = lines_of(doctor.check_hub)[2]
    assert "warning the Hub does not take the token (OSError 401)" in line
    assert SECRETS["HF_TOKEN"] not in line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline" in lines_of(doctor.check_hub)[1]


def test_disks_without_room_or_writes(alone, monkeypatch):
    def fail(*_, **__):
        raise OSError(122, "Disk quota exceeded")

    (alone / "file").touch()
    line = lines_of(doctor.check_disk, alone / "file", "output_dir")[0]
    assert line.startswith("missing output_dir")
    monkeypatch.setattr(doctor, "LEAST_FREE_GIB", 10**9)
    assert "warning output_dir" in lines_of(doctor.check_disk, alone / "runs", "output_dir")[0]
    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", fail)
    (line,) = lines_of(doctor.check_disk, alone / "runs", "output_dir")
    assert line.startswith("missing output_dir")
    assert "Disk quota exceeded" in line
