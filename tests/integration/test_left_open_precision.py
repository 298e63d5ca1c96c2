"""A run whose bf16 the CPU decided keeps it: another CPU's answer is another run."""

import pytest

import pretrain
from utils.config import precision as cpu_precision
from utils.config.errors import ConfigurationError
from utils.config.recipes import load_mapping

pytestmark = pytest.mark.slow


def test_a_run_stays_with_what_its_first_cpu_decided(pretraining, tmp_path, monkeypatch, capfd):
    run = tmp_path / "run"
    monkeypatch.setattr(cpu_precision, "has_amx", lambda: True)
    argv = pretraining(run, bf16="null", max_steps=1, save_steps=1)
    assert pretrain.main(argv) == 0
    said = "mixed precision bf16 (this CPU has AMX; --bf16 false for float32)"
    assert said in capfd.readouterr().out
    values, _ = load_mapping((run / "config.yaml").read_text())
    assert (values["bf16"][0], values["use_cpu"][0]) == (True, True)
    longer = pretraining(run, bf16="null", max_steps=2)
    monkeypatch.setattr(cpu_precision, "fast_bf16", lambda: None)
    with pytest.raises(ConfigurationError, match=r"its bf16 is True, now it is False"):
        pretrain.main(longer)
    # Asked for, it goes on in bf16 there too.
    assert pretrain.main(pretraining(run, bf16=True, use_cpu=True, max_steps=2, save_steps=1)) == 0
    assert "resuming from" in capfd.readouterr().out
