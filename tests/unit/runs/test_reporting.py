from types import SimpleNamespace

import pytest

from utils.callbacks.metrics import TerminalProgress
from utils.config.settings import parse_pretraining
from utils.runs.finish import run_callbacks
from utils.runs.start import Run


@pytest.mark.parametrize(
    ("is_terminal", "job", "bars"),
    [(True, None, True), (False, None, False), (True, "42", False)],
)
def test_bars_are_for_people_at_a_terminal(is_terminal, job, bars, tmp_path, monkeypatch):
    """In a job stdout may be a terminal of srun's, whose bars would fill the log."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if job:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    given = "--output_dir run --train_data data --model_config model.yaml --sequence_length 64"
    settings = parse_pretraining([*given.split(), "--global_batch_size", "8"], "")
    checkpoints = SimpleNamespace()
    run = Run(tmp_path, None, None, False, 0, False, ("n1",), checkpoints)
    callbacks = run_callbacks(settings, run)
    assert any(isinstance(callback, TerminalProgress) for callback in callbacks) == bars
