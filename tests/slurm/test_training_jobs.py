"""`sbatch slurm/multinode_job.sh` on two nodes of two processes gets the numbers of one process."""

import pytest
import tiny
import torch
from training_jobs import STEPS, TrainingJobs

import pretrain

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(jobs: TrainingJobs, tmp_path_factory):
    """Run the same training in one process, without launcher and Slurm."""
    run = tmp_path_factory.mktemp("alone") / "run"
    torch.set_num_threads(1)  # two threads would wait for each other beside other tests
    pretrain.main(jobs.flags(run, use_cpu="true", per_device_train_batch_size=2))
    return run


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("config", ["multi_gpu", "fsdp2", "hsdp", "zero2"])
def test_four_ranks_on_two_nodes_train_as_one_process_does(jobs, alone, config):
    run = jobs.finished(config)
    assert tiny.losses(run) == pytest.approx(tiny.losses(alone), abs=5e-5)
    assert len(tiny.losses(run)) == STEPS
    assert tiny.evaluations(run, "heldout") == pytest.approx(
        tiny.evaluations(alone, "heldout"), abs=5e-5
    )
    assert (run / "final" / "model.safetensors").is_file()
    start = tiny.starts(run)[0]
    assert start["launch"]["world_size"] == 4
    assert sorted(start["launch"]["hosts"]) == ["n1", "n2"]
    assert start["slurm"]["nodes"] == "2"
