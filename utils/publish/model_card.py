"""The model card: README.md of final/ and adapter/.

All facts come from config.yaml, provenance.json, metrics.jsonl and the descriptions of the data.
The card contains no host name and no absolute path.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, try_to_load_from_cache

from utils.checkpoints.files import CONFIG, FINAL
from utils.checkpoints.record import RunRecord, settings_in_force
from utils.config.arguments import train_sources
from utils.config.declarations import EMPTY_DEFAULTS, shown
from utils.data.token_dataset import TokenDataset
from utils.host.foreign import read_object
from utils.host.journal_file import duration, read_journal
from utils.host.redaction import redact
from utils.publish.hub import ADAPTER_CONFIG, CARD, HUB_NAME

LICENSE = ("license", "license_name", "license_link")
# Settings that affect the results. The card shows those that have a value and an effect.
LISTED_SETTINGS = (
    "sequence_length", "packing", "on_overlong", "global_batch_size", "batch_warmup",
    "max_steps",
    "num_train_epochs", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps",
    "weight_decay", "max_grad_norm", "optim", "optim_states", "bf16", "fp16", "dtype",
    "stochastic_rounding", "load_in_4bit", "load_in_8bit", "lora_r", "lora_alpha", "lora_dropout",
    "lora_target_modules", "lora_target_parameters", "lora_modules_to_save", "use_rslora",
    "use_dora", "neftune_noise_alpha", "ema_decay", "ddp_comm_hook", "seed",
)  # fmt: skip
SOURCES_SHOWN = 5
# Settings of adapters that vLLM refuses (vllm/lora/peft_helper.py). PEFT also refuses the last one.
HARD_TO_SERVE = ("modules_to_save", "target_parameters", "use_dora", "trainable_token_indices")
# The folder of a downloaded model or dataset in the Hub's cache.
_HUB_CACHE_FOLDER = re.compile(r"(models|datasets)--([^/\s]+?)--([^/\s]+)/snapshots/")
_HUB_URL = re.compile(r"hf://datasets/([^/\s@]+/[^/\s@]+)")
_ABSOLUTE = re.compile(r"(?<![\w./:~)-])/(?:[^\s/'\"`=,:]+/)*([^\s/'\"`=,:]+)")


def public(text: str) -> str:
    """Return a text with absolute paths shortened to relative paths or to file names.

    Paths in the working directory become relative. Other paths lose their folders.

    >>> public("sft_train.py --train_data /home/me/data/chats=0.5 --output_dir runs/mine")
    'sft_train.py --train_data chats=0.5 --output_dir runs/mine'
    """
    return _ABSOLUTE.sub(r"\1", text.replace(f"{Path.cwd()}/", ""))


def shown_name(run: Path, folder: str) -> str:
    """Return the name of a model that is not on the Hub: RUN/FOLDER, never an absolute path."""
    inside = run.resolve().is_relative_to(Path.cwd())
    return str((run.resolve().relative_to(Path.cwd()) if inside else Path(run.name)) / folder)


def base_model(run: Path) -> tuple[str | None, dict[str, Any]]:
    """Return the Hub name and the license fields of the model from which a run started.

    If the run started from another run's weights, return the other run's base model. None means
    that the name is unknown. {} means that the license is unknown.
    """
    starts = RunRecord(run).starts
    settings = settings_in_force(run, starts)
    name = settings.get("model_name_or_path")
    if settings.get("init_from"):
        origins = [start["weights_from"] for start in starts if start.get("weights_from")]
        name = origins[-1]["path"] if origins else settings["init_from"]
    if name is None:
        return None, {}
    directory = Path(name)
    if (directory.parent / CONFIG).is_file():  # a run's final/ or checkpoint, maybe deleted
        return base_model(directory.parent)
    if HUB_NAME.fullmatch(name) and not directory.is_dir():
        cached = try_to_load_from_cache(name, CARD, revision=settings.get("model_revision"))
        return name, license_of(Path(cached)) if isinstance(cached, str) else {}
    found = _HUB_CACHE_FOLDER.search(f"{directory.resolve()}/")
    return "/".join(found.groups()[1:]) if found else None, license_of(directory / CARD)


def license_of(card: Path) -> dict[str, Any]:
    """Return the license fields in a model card's metadata; {} if there is no card."""
    if not card.is_file():
        return {}
    facts = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    return {name: facts[name] for name in LICENSE if facts.get(name)}


def hub_name_of_source(path: str) -> str | None:
    """Return the Hub name of the dataset to which a source file belongs; None if unknown."""
    if found := _HUB_URL.match(path):
        return found[1]
    found = _HUB_CACHE_FOLDER.search(path)
    return f"{found[2]}/{found[3]}" if found and found[1] == "datasets" else None


def _source_files(dataset: TokenDataset) -> list[str]:
    prepared = dataset.description.preparation
    parts = [prepared, *prepared.get("appended", ())]
    return [name for each in parts for name in each.get("sources", {}).get("first_files", {})]


class RunCard:
    """The card of the finished model or adapter in `directory`.

    name: the model's name in the card, RUN/FOLDER. step: the step of the weights. data: the
    datasets of `train_data`. multimodal: True if the model also has an image or audio encoder,
    which AutoModelForCausalLM does not load. Unreadable files of the run raise an error.
    """

    def __init__(
        self, directory: Path, name: str, run: Path, step: int, data: Sequence[TokenDataset],
        *, multimodal: bool = False,
    ):  # fmt: skip
        self.directory, self.name, self.run, self.step, self.data = directory, name, run, step, data
        self.multimodal = multimodal
        starts = RunRecord(run).starts
        self.settings, self.start = settings_in_force(run, starts), starts[-1]
        self.is_adapter = (directory / ADAPTER_CONFIG).is_file()
        self.adapter_config = read_object(directory / ADAPTER_CONFIG) if self.is_adapter else {}
        self.fine_tuned = self.start["script"] == "sft_train.py"
        self.base, self.license = base_model(run)

    def write(self) -> None:
        """Write README.md into `directory`, without absolute paths and secrets."""
        body = public("\n".join(self._lines()))
        text = f"---\n{self._metadata().to_yaml()}\n---\n\n{body}\n"
        (self.directory / CARD).write_text(redact(text), encoding="utf-8")

    def _metadata(self) -> ModelCardData:
        paths = [path for each in self.data for path in _source_files(each)]
        kind = "sft" if self.fine_tuned else "pretraining"
        return ModelCardData(
            base_model=self.base,
            base_model_relation=self.base and ("adapter" if self.is_adapter else "finetune"),
            datasets=sorted(set(filter(None, map(hub_name_of_source, paths)))) or None,
            library_name="peft" if self.is_adapter else "transformers",
            pipeline_tag="text-generation",
            tags=["stoker", kind, *(["lora"] if self.settings.get("use_peft") else [])],
            **self.license,
        )

    def _lines(self) -> Iterator[str]:
        yield f"# {Path(self.name).parent.name}\n"
        yield self._summary()
        yield "\n## Use\n"
        yield from self._usage()
        yield "\n## Data\n"
        yield "| data | documents | tokens | trained on | sources |\n|---|---|---|---|---|"
        weights = train_sources(self.settings["train_data"])
        if len(weights) > len(self.data):  # several raw files, without weights, are one dataset
            weights = dict.fromkeys(str(dataset.path) for dataset in self.data)
        for (path, weight), dataset in zip(weights.items(), self.data, strict=True):
            counts, files = dataset.description.statistics, _source_files(dataset)
            share = counts.loss_tokens / max(counts.tokens, 1)
            names = list(
                dict.fromkeys(hub_name_of_source(each) or Path(each).name for each in files)
            )
            sources = ", ".join(f"`{each}`" for each in names[:SOURCES_SHOWN]) or "not known"
            more = len(names) - SOURCES_SHOWN
            yield (
                f"| `{path}`{'' if weight is None else f', weight {weight:g}'} | "
                f"{counts.documents:,} | {counts.tokens:,} | {share:.1%} of the tokens | "
                f"{sources}{f' and {more} more' if more > 0 else ''} |"
            )
        yield "\n## Training\n"
        yield from _figures_table(self.run, self.step, self.start["launch"])
        yield "\n| setting | value |\n|---|---|"
        for key in LISTED_SETTINGS:
            moot = key.startswith(("lora_", "use_")) and not self.settings.get("use_peft")
            moot |= key == "num_train_epochs" and self.settings.get("max_steps", -1) > 0
            if not moot and (key == "seed" or self.settings.get(key) not in EMPTY_DEFAULTS):
                yield f"| `{key}` | {shown(self.settings[key])} |"
        git = self.start.get("git") or {"commit": "unknown", "dirty": False}
        changed = ", with changed files," if git["dirty"] else ""
        yield f"\nIts last start, in a clone of Stoker at commit {git['commit']}{changed} was"
        yield f"(the run's {CONFIG} has all settings):\n"
        launch, command = self.start["launch"], ["python"]
        if launch["world_size"] > 1:
            config = launch["strategy"].replace("ddp", "multi_gpu")
            command = ["accelerate", "launch", "--config_file", f"accelerate_configs/{config}.yaml"]
            command += ["--num_processes", str(launch["world_size"])]
        command += [self.start["script"], *self.start["argv"][1:]]
        yield f"```bash\n{shlex.join(command)}\n```\n"
        versions = {"Python": self.start["python"], **self.start["versions"]}
        yield ", ".join(f"{each} {version}" for each, version in versions.items() if version) + "."

    def _summary(self) -> str:
        given = self.settings.get("init_from") or self.settings.get("model_name_or_path")
        base = self.base
        model = f"`{given}`" if base is None else f"[{base}](https://huggingface.co/{base})"
        model += "" if base in (None, given) else f" (by way of `{given}`)"
        if given is None:
            kind = (self.start.get("model_config") or {}).get("model_type", "language model")
            done = f"A {kind} trained from random weights"
        elif not self.settings.get("use_peft"):
            done = f"All weights of {model} were trained"
        elif self.is_adapter:
            done = f"LoRA adapters of {model}, trained"
        else:
            done = f"LoRA adapters of {model} were trained, and merged into its weights,"
        what, script = "answers" if self.fine_tuned else "documents", self.start["script"]
        return f"{done} on the {what} of the data below, by Stoker's {script}."

    def _usage(self) -> Iterator[str]:
        name, base, serve = self.name, self.name, f"vllm serve {self.name}\n"
        if self.is_adapter:
            base = self.base or "BASE"
            serve = f"vllm serve {base} --enable-lora --lora-modules mine={name}\n"
        if any(self.adapter_config.get(key) for key in HARD_TO_SERVE):
            serve = ""
            yield (
                "The adapter has more than LoRA matrices. vLLM does not serve it, and PEFT cannot "
                f"add new tokens to its base: use the run's merged model, `{FINAL}/`.\n"
            )
        else:
            yield from self._python_code(base)
        yield f"```bash\n{serve}python chat.py {name}   # in a clone of Stoker\n```"

    def _python_code(self, base: str) -> Iterator[str]:
        """Yield Markdown with Python code that loads the model and generates text.

        base: the model to load; for an adapter, its base model.
        """
        name = self.name
        loader = f"AutoModelFor{'MultimodalLM' if self.multimodal else 'CausalLM'}"
        prompt, answer = '"The sky is"', '["generated_text"]'
        if (self.directory / "chat_template.jinja").is_file():
            prompt = '[{"role": "user", "content": "Why is the sky blue?"}]'
            answer += '[-1]["content"]'
        yield "```python"
        if self.is_adapter:
            yield "from peft import PeftModel"
        yield f"from transformers import {loader}, AutoTokenizer, pipeline\n"
        yield f'model = {loader}.from_pretrained("{base}", dtype="auto")'
        if self.is_adapter:
            yield f'model = PeftModel.from_pretrained(model, "{name}")'
        yield f'tokenizer = AutoTokenizer.from_pretrained("{name}")'
        yield 'generate = pipeline("text-generation", model, tokenizer=tokenizer)'
        yield f"print(generate({prompt}, max_new_tokens=256)[0]{answer})\n```\n"


def _figures_table(run: Path, step: int, launch: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a Markdown table: steps, tokens, time and losses at `step`.

    launch: the number and kind of devices, as in provenance.json.
    """
    lines = sorted(read_journal(run / "metrics.jsonl"), key=lambda line: line["step"])
    trained = [line for line in lines if line["event"] == "train" and line["step"] <= step]
    seconds, last = 0.0, 0
    for line in trained:
        seconds += line.get("step_time_s", 0.0) * (line["step"] - last)
        last = line["step"]
    devices = f"{launch['world_size']} x {launch['devices'][0]} ({launch['strategy']})"
    yield "| figure | value |\n|---|---|"
    yield f"| steps | {step:,} |"
    if trained:
        yield f"| tokens seen | {trained[-1].get('tokens_seen', 0):,.0f} |"
        yield f"| time of the steps | {duration(seconds)} on {devices} |"
        yield f"| training loss, last logged | {trained[-1].get('loss', float('nan')):.4f} |"
    for line in lines:
        for key, value in line.items():
            if line["step"] == step and re.fullmatch(r"eval_\w+_(loss|perplexity|accuracy)", key):
                yield f"| `{key}` | {value:.4f} |"
