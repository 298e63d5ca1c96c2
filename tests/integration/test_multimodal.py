"""Models for images train on text with transformers' own loss, and are saved whole."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from families import WITH_IMAGES, tiny_config, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, IdeficsConfig, MusicgenConfig

import pretrain
from utils.config.errors import ConfigurationError
from utils.model.architecture import causal_lm_class, non_text_parameters
from utils.model.config import text_runnable_config
from utils.model.probe import build_probe_model, probe_config
from utils.run.chat import load

# The models have, in this order: three rows of positions; layers for images inside the text model;
# attention that looks ahead without a mask; experts; recurrent layers; token types of images. The
# last model is an ordinary one.
MODELS = ["qwen3_vl", "mllama", "paligemma", "kimi_k25", "qwen3_5", "gemma3", "mistral3"]
PROCESSOR = {
    "preprocessor_config.json": '{"image_mean": [0.5]}', "processor_config.json": '{"a": 1}',
    "video_preprocessor_config.json": '{"b": 2}', "chat_template.json": '{"chat_template": "old"}',
}  # fmt: skip


ROWS = tiny.masked(tiny.documents(3, seed=5))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory) -> dict[str, object]:
    data = tiny.save(tmp_path_factory.mktemp("data") / "heldout", ROWS)
    return {"eval_data": f"heldout={data}", "eval_steps": 3, "max_steps": 3, "save_steps": 2}


def make_base(name: str, directory: Path) -> Path:
    model = tiny_model(tiny_config(name))
    model.save_pretrained(directory)
    tiny.make_tokenizer(directory)
    for file, content in PROCESSOR.items():
        (directory / file).write_text(content)
    return directory


def plain_loss(directory: Path) -> float:
    """Return transformers' mean loss of the held-out answers, one document at a time."""
    model = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager")
    return tiny.plain_loss(model, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_for_images_trains_on_text(name, fine_tuned, evaluated, tmp_path):
    base = make_base(name, tmp_path / "base")
    settings = evaluated | {"model_name_or_path": base, "eval_on_start": True}
    settings["packing"] = "none" if name == "qwen3_5" else "best_fit"
    run = fine_tuned(tmp_path / "run", **settings)
    losses = tiny.evaluations(run, "heldout")
    assert losses[0] == pytest.approx(plain_loss(base), abs=2e-6)
    assert losses[3] == pytest.approx(plain_loss(run / "final"), abs=2e-6)
    assert losses[3] < losses[0]
    final, info = AutoModelForImageTextToText.from_pretrained(
        run / "final", output_loading_info=True
    )
    assert not any(info.values())
    original = tiny_model(tiny_config(name))
    assert type(final) is type(original)
    frozen, before = non_text_parameters(original), dict(original.named_parameters())
    assert frozen
    for key, value in final.named_parameters():
        assert value.equal(before[key]) == (key in frozen), key
    for directory in (run / "final", run / "checkpoint-2"):
        for file, content in PROCESSOR.items():
            assert (directory / file).read_text() == content
    said = final.generate(torch.arange(2, 12)[None], max_new_tokens=3, min_new_tokens=3)
    assert said.shape == (1, 13)
    model, _ = load(str(run / "final"), "cpu", "float32")
    assert type(model) is type(original)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "mllama"])
def test_lora_resumes_and_does_not_adapt_towers(name, fine_tuned, evaluated, tmp_path):
    base = make_base(name, tmp_path / "base")
    settings = evaluated | {"model_name_or_path": base, "use_peft": True}
    run = fine_tuned(tmp_path / "run", **settings)
    losses = tiny.losses(run)
    fine_tuned(tiny.cut(run, 2), **settings)
    assert tiny.losses(run) == losses
    assert tiny.evaluations(run, "heldout")[3] == pytest.approx(plain_loss(run / "final"), abs=2e-6)
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    adapted = {key.split(".lora_")[0].removeprefix("base_model.model.") for key in adapter}
    towers = non_text_parameters(tiny_model(tiny_config(name))).keys()
    assert adapted
    assert not {f"{key}.weight" for key in adapted} & towers
    card = (run / "adapter" / "README.md").read_text()
    assert "AutoModelForMultimodalLM.from_pretrained(" in card
    assert "PeftModel.from_pretrained(model, " in card


@pytest.mark.slow
def test_pretraining_from_a_configuration_keeps_towers(pretrained, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny_config("mistral3").to_dict()))
    run = pretrained(tmp_path / "run", model_config=config, max_steps=2)
    stage = pretrained(tmp_path / "stage", model_config=None, init_from=run, max_steps=2)
    made, after = (
        AutoModelForImageTextToText.from_pretrained(each / "final") for each in (run, stage)
    )
    tower = dict(after.model.vision_tower.named_parameters())
    for key, value in made.model.vision_tower.named_parameters():
        assert value.equal(tower[key])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("blip-2", "needs pixel_values beside text"),
        ("florence2", "is an encoder with a decoder"),
        ("qwen2_5_omni", r"Qwen2_5OmniThinkerForConditionalGeneration\.from_pretrained"),
        ("diffusion_gemma", "computes no loss of the next token"),
        ("vit", "no causal language model"),
    ],
)
def test_what_cannot_learn_from_text_alone_says_why(name, told):
    from transformers import CONFIG_MAPPING

    with pytest.raises(ConfigurationError, match=told):
        causal_lm_class(CONFIG_MAPPING[name]())


def test_a_model_that_asks_for_images_with_each_text_is_refused():
    config = IdeficsConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, additional_vocab_size=0, pad_token_id=1,
        vision_config=WITH_IMAGES["vision_config"] | {"embed_dim": 32},
    )  # fmt: skip
    with pytest.raises(ConfigurationError, match="'idefics' does not run on text alone"):
        text_runnable_config(config)


def test_towers_of_a_probe_take_no_memory():
    config = tiny_config("mistral3")
    config.vision_config.hidden_size = config.vision_config.intermediate_size = 4096
    config.vision_config.head_dim = 1024
    model = build_probe_model(probe_config(config), "eager")
    idle = list(non_text_parameters(model).values())
    assert sum(value.numel() for value in idle) > 50_000_000
    assert sum(value.untyped_storage().nbytes() for value in idle) < 1000
    assert model(input_ids=torch.arange(1, 5)[None]).logits.isfinite().all()


def test_a_model_with_two_texts_is_refused_at_the_start(pretraining, tmp_path):
    """Musicgen has an encoder and a decoder for text, so its text part is not unique."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MusicgenConfig().to_dict()))
    with pytest.raises(ConfigurationError, match="is an encoder with a decoder"):
        pretrain.main(pretraining(tmp_path / "run", model_config=config, max_steps=2))
