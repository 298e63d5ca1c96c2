"""xLSTM trains with native kernels on a CPU and Triton's on a GPU."""

import json
import shutil

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, xLSTMConfig

import pretrain
from utils.config.errors import ConfigurationError
from utils.model import architecture
from utils.run.chat import load

# Kernel names of NX-AI/xLSTM-7b. With Triton its mode has no backward pass.
PUBLISHED = {
    "chunkwise_kernel": "chunkwise--triton_xl_chunk", "sequence_kernel": "native_sequence__triton",
    "step_kernel": "triton", "mode": "inference", "chunk_size": 64, "return_last_states": True,
}  # fmt: skip
SIZES = {
    "model_type": "xlstm", "hidden_size": 128, "embedding_dim": 128, "num_hidden_layers": 2,
    "num_blocks": 2, "num_heads": 2, "vocab_size": tiny.VOCABULARY,
    "autocast_kernel_dtype": "float32",
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.slow
def test_xlstm_trains_on_a_cpu(pretraining, pretrained, fine_tuned, tmp_path):
    architecture.accept_xlstm_kernels()
    config, rows = tmp_path / "config.json", tiny.documents(3, seed=5)
    config.write_text(json.dumps(SIZES | PUBLISHED))
    heldout = tiny.save(tmp_path / "heldout", {"input_ids": rows})
    settings = {
        "model_config": config, "packing": "none", "on_overlong": None,
        "eval_steps": 6, "eval_data": f"heldout={heldout}", "eval_on_start": True, "max_steps": 6,
    }  # fmt: skip
    run = pretrained(tmp_path / "run", **settings)
    losses, evaluated = tiny.losses(run), tiny.evaluations(run, "heldout")
    assert evaluated[6] < evaluated[0] - 0.1
    # Compare with transformers' own kernels for CPUs.
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    expected = tiny.plain_loss(final, {"input_ids": rows})
    assert evaluated[6] == pytest.approx(expected, abs=2e-6)
    pretrained(tiny.cut(run, 3), **settings)
    assert tiny.losses(run) == losses
    with pytest.raises(ConfigurationError, match="set --packing none"):
        pretrain.main(pretraining(tmp_path / "packed", model_config=config))
    shutil.copy(tiny.make_tokenizer(tmp_path / "tokenizer") / "tokenizer.json", run / "final")
    tuned = {"model_name_or_path": run / "final", "packing": "none", "use_peft": True}
    tuned_run = fine_tuned(tmp_path / "tuned", **tuned, max_steps=2)
    model, _ = load(str(tuned_run / "final"), "cpu", "float32")
    said = model.generate(torch.arange(2, 12)[None], max_new_tokens=3, min_new_tokens=3)
    assert said.shape == (1, 13)


def test_the_device_chooses_the_kernels(monkeypatch, caplog):
    caplog.set_level("INFO")
    architecture.accept_xlstm_kernels()
    config = xLSTMConfig(**PUBLISHED)
    architecture.choose_xlstm_kernels(config, "cuda", 100)
    assert config.chunkwise_kernel == "chunkwise--native_autograd"
    assert "pip install xlstm" in caplog.text
    monkeypatch.setattr(architecture, "is_xlstm_available", lambda: True)
    with pytest.raises(ConfigurationError, match=r"chunk_size, 64: set it to 128"):
        architecture.choose_xlstm_kernels(config, "cuda", 100)
    architecture.choose_xlstm_kernels(config, "cuda", 128)
    assert config.chunkwise_kernel == PUBLISHED["chunkwise_kernel"]
    architecture.choose_xlstm_kernels(config, "cpu", 100)
    assert (config.chunkwise_kernel, config.step_kernel) == ("chunkwise--native_autograd", "native")


@pytest.mark.gpu
def test_triton_kernels_train_as_native_ones_do(monkeypatch):
    pytest.importorskip("xlstm")
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "model_type"}
    sizes |= {"hidden_size": 256, "embedding_dim": 256}
    tokens, losses, state = torch.randint(3, 128, (2, 128), device="cuda"), {}, None
    for kernels in ("native", "triton"):
        config = xLSTMConfig(**sizes, chunk_size=64)
        monkeypatch.setattr(
            architecture, "is_xlstm_available", lambda kernels=kernels: kernels == "triton"
        )
        architecture.choose_xlstm_kernels(config, "cuda", 128)
        model = AutoModelForCausalLM.from_config(config).cuda()
        state = state or model.state_dict()
        model.load_state_dict(state)
        architecture.add_input_hooks(model)
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses[kernels] = loss.item()
        assert all(value.grad is not None for value in model.parameters())
        model.eval()(input_ids=tokens[:, :100])  # any length is allowed outside of training
    assert losses["triton"] == pytest.approx(losses["native"], rel=1e-2)
