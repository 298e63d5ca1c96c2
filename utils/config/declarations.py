"""Declarations of settings, and the values of all settings with the source of each value.

REFUSED and other_names.yaml have answers to users who give a refused or unknown setting.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import Enum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from utils.config.errors import ConfigurationError

# Defaults that mean "nothing". A setting with such a default may be set to null.
NOTHING: tuple[Any, ...] = (None, [], {}, "", "no", "none", False, 0, -1)
_TYPE_NAMES: dict[Any, str] = {
    bool: "true or false", int: "an integer", float: "a number", str: "a string",
    dict: "a mapping", list: "a list", NoneType: "null",
}  # fmt: skip
FLAGS_RANK = 10**6  # above any number of recipe files
Arguments = TypeVar("Arguments")


OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
HELP = Path(__file__).with_name("help.yaml")


def by_name(table: Mapping[str, str]) -> dict[str, str]:
    """Turn {answer: names separated by spaces} into {name: answer}."""
    return {name: answer for answer, names in table.items() for name in names.split()}


# Library settings that a user cannot set. The reason completes "... cannot be set here:".
REFUSED = by_name({
    "strategy says how processes share the model, as in strategy: fsdp2": ""
    "deepspeed fsdp fsdp_config parallelism_config",
    "final/ is uploaded once, at the end of the run: push_to_hub with hub_model_id": ""
    "hub_always_push hub_revision hub_strategy",
    "settings are printed and saved, tokens must not be: put HF_TOKEN into the environment or .env":
    "hub_token",
    "it makes a dense attention mask on packed sequences: --compile true compiles layer by layer":
    "torch_compile torch_compile_backend torch_compile_mode",
    "the script always trains, evaluates as eval_strategy says, keeps no predictions, and logs "
    "tokens and memory": "batch_eval_metrics do_eval do_predict do_train eval_accumulation_steps "
    "eval_do_concat_batches eval_use_gather_object include_for_metrics "
    "include_num_input_tokens_seen prediction_loss_only skip_memory_metrics",
    "a run saves all that it needs, as save_steps says and when it is stopped, and resumes by "
    "itself": "enable_jit_checkpoint ignore_data_skip save_on_each_node "
    "save_only_model",
    "it follows from global_batch_size, which is per_device_train_batch_size x gradient "
    "accumulation x ranks: give that": "auto_find_batch_size gradient_accumulation_steps",
    "the loader divides full global batches of packed sequences over the ranks, in an order that "
    "follows from seed": "accelerator_config data_seed dataloader_drop_last dataloader_in_order "
    "dataloader_multiprocessing_context eval_packing label_names length_column_name "
    "packing_strategy pad_to_multiple_of padding_free remove_unused_columns shuffle_dataset "
    "train_sampling_strategy",
    "the loss is the negative log-likelihood of the next token, the mean over the global batch": ""
    "average_tokens_across_devices label_smoothing_factor loss_type",
    "Liger's kernels are not tested with packed sequences": "liger_kernel_config use_liger_kernel",
    "the launcher gives the rank through the environment": "local_rank",
    "code that comes with a model is not run": "trust_remote_code",
    "with a cache, packed documents would attend to each other": "use_cache",
    "prepare_data.py tokenizes the data, applies the chat template and marks what is trained on": ""
    "assistant_only_loss chat_template_path completion_only_loss dataset_kwargs dataset_num_proc "
    "dataset_text_field",
    "special tokens come from the tokenizer: --tokenizer_name_or_path": "eos_token pad_token",
    "set --sequence_length, and --on_overlong for longer documents": "max_length truncation_mode",
    "models are set by --model_name_or_path, --dtype and their like": "model_init_kwargs",
    "8 bits are not supported: load_in_4bit: true takes half as much, dtype: bfloat16 twice": ""
    "load_in_8bit",
    "Stoker sets it as the strategy needs it: remove it": ""
    "bnb_4bit_quant_storage",
    "LoRA here is for causal language models": "lora_task_type",
})  # fmt: skip


class UnusableSettingError(LookupError):
    """The error of reading a missing or faulty setting, which ends the check that reads it."""


@dataclass(frozen=True)
class Declaration:
    """A setting, declared by a field of the argument class `owner`.

    types    members of the type hint, as (int, NoneType) of `int | None`
    origins  the same, but with list instead of `list[str]`
    choices  the allowed values besides null; None: all values of the types
    default  None if the setting is required
    """

    name: str
    owner: type
    types: tuple[Any, ...]
    origins: list[Any]
    choices: tuple[Any, ...] | None
    required: bool
    default: Any
    help: str


def setting(default: Any = dataclasses.MISSING, help: str = "", **metadata: Any) -> Any:
    """Return a dataclass field that declares a setting, which is required without a default."""
    metadata = {"help": help, "ours": True, **metadata}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def declared_settings(argument_classes: Iterable[type]) -> dict[str, Declaration]:
    """Return every setting that a user may give: the fields of the classes except REFUSED.

    If two classes have a field of the same name, the first class declares the setting.
    """
    declared: dict[str, Declaration] = {}
    for owner in argument_classes:
        hints = get_type_hints(owner)
        for each in dataclasses.fields(owner):
            if each.init and each.name not in REFUSED and each.name not in declared:
                declared[each.name] = _declaration(owner, hints[each.name], each)
    return declared


def _declaration(owner: type, hint: Any, each: dataclasses.Field) -> Declaration:
    types, missing = _members(hint), dataclasses.MISSING
    default = each.default
    if each.default_factory is not missing:
        default = each.default_factory()
    choices = each.metadata.get("choices")
    for member in types:  # transformers' `SomeEnum | str` allows only the enum's values
        if isinstance(member, type) and issubclass(member, Enum):
            choices = tuple(item.value for item in member)
    text = str(each.metadata.get("help", "see --help")).replace("%%", "%")  # argparse's escape
    if "ours" not in each.metadata:
        text = help_file()["texts"].get(each.name, text)
    return Declaration(
        name=each.name,
        owner=owner,
        types=types,
        origins=[get_origin(member) or member for member in types],
        choices=choices,
        required=default is missing,
        default=None if default is missing else getattr(default, "value", default),
        help=text,
    )


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def checked_value(declaration: Declaration, value: Any) -> Any:
    """Return the value in the setting's type. Raises ValueError if the value does not fit.

    An integer becomes a float, and a single value a list, if the type demands it. But 4.0 is no
    integer, 1 is not true, and "3" is no number. null is kept if
    the type allows null. Otherwise null means the default, if the default is in NOTHING.
    """
    choices, origins, got = declaration.choices, declaration.origins, json.dumps(value, default=str)
    if value is None and not declaration.required:
        if NoneType in origins or declaration.default in NOTHING:
            return None if NoneType in origins else declaration.default
        raise ValueError(f"it cannot be null; leave it out for {declaration.default}")
    if choices is not None:
        # --log_level DEBUG means debug.
        word = value.lower() if isinstance(value, str) and value not in choices else value
        if any(type(word) is type(choice) and word == choice for choice in choices):
            return word
        raise ValueError(f"expected one of {', '.join(map(shown, choices))}; got {got}")
    types = declaration.types
    if dict in origins:  # transformers' `dict | str` may be a file name; here only JSON is allowed
        types = tuple(each for each in types if each is not str)
        if isinstance(value, str):
            with suppress(json.JSONDecodeError):
                value = json.loads(value)
    elif type(value) is int and float in origins:
        value = float(value)
    elif list in origins and str not in origins and not isinstance(value, list):
        value = [value]
    if any(_fits(value, hint) for hint in types):
        return value
    names = dict.fromkeys(_TYPE_NAMES.get(get_origin(hint) or hint, str(hint)) for hint in types)
    raise ValueError(f"expected {' or '.join(names)}, got {got}")


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(value, list) and get_origin(hint) is list:
        elements = _members(*get_args(hint))
        return all(any(_fits(item, element) for element in elements) for item in value)
    return type(value) is (get_origin(hint) or hint)  # isinstance would take true for an int


def is_true(variable: str, environment: Mapping[str, str]) -> bool:
    """Return whether an environment variable has a value that accelerate reads as true."""
    words = ("1", "true", "yes", "on", "y", "t")  # accelerate/utils/environment.py, str_to_bool
    return environment.get(variable, "").lower() in words


def shown(value: Any) -> str:
    """Return a value as text for a message, written as in a recipe or after a flag."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return " ".join(map(shown, value)) or "null"
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value, default=str)


def counted_ranks(number: int) -> str:
    """Return "1 rank" or "8 ranks"."""
    return f"{number} {'rank' if number == 1 else 'ranks'}"


def placeholder(declaration: Declaration) -> str:
    """Return the value of a setting in help texts: "a|b" for choices, or a word such as INTEGER."""
    if declaration.choices is not None:
        return "|".join(map(shown, declaration.choices))
    words = {bool: "true|false", int: "INTEGER", float: "NUMBER", dict: "JSON", list: "VALUE ..."}
    return next((word for each, word in words.items() if each in declaration.origins), "TEXT")


@dataclass(frozen=True)
class Given:
    """A value and its source: "recipes/demo.yaml:3", "--seed", or the reason of a derived value.

    rank: 0 for a derived value, 1, 2, ... for recipe files in order, FLAGS_RANK for flags. The
    highest rank wins.
    """

    value: Any
    source: str
    rank: int = 0


DEFAULT = Given(None, "default")


@dataclass(eq=False)
class SettingValues(Mapping[str, Any]):
    """The values of all settings by name, before objects are built from them.

    unusable     missing or faulty settings; reading one raises UnusableSettingError
    notes        log lines on overruled and derived settings
    environment  the environment variables of this process, or in a dry run of the planned run
    """

    declared: Mapping[str, Declaration]
    given: dict[str, Given]
    unusable: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def world_size(self) -> int:
        """Return the number of processes of the launch."""
        return int(self.environment.get("WORLD_SIZE", "1"))

    @property
    def on_cpu(self) -> bool:
        """Return whether the settings or the launch ask for the CPU."""
        return bool(self["use_cpu"] or is_true("ACCELERATE_USE_CPU", self.environment))

    def __getitem__(self, name: str) -> Any:
        if name in self.unusable:
            raise UnusableSettingError(name)
        if name in self.given:
            return self.given[name].value
        return copy.copy(self.declared[name].default)  # no reader can change the default

    def __iter__(self) -> Iterator[str]:
        return iter(self.declared)

    def __len__(self) -> int:
        return len(self.declared)

    def written(self, name: str) -> Any:
        """Return a value as in a recipe: a count of steps or tokens is 180, not 180.0."""
        value, default = self[name], self.declared[name].default
        is_count = type(default) is int or name.endswith(("_steps", "_tokens", "_epochs"))
        return int(value) if is_count and type(value) is float and value.is_integer() else value

    def source(self, name: str) -> str:
        """Return the source of a value: file and line, flag, reason to derive it, or "default"."""
        return self.given.get(name, DEFAULT).source

    def rank(self, name: str) -> int:
        """Return the rank of a setting's source (see Given): 0 for a default or derived value."""
        return self.given.get(name, DEFAULT).rank

    def derive(self, name: str, value: Any, why: str) -> None:
        """Set a value that follows from other settings, and add a line to `notes`."""
        self.given[name] = Given(value, why)
        self.notes.append(f"{name} {shown(value)}: {why}")

    def changed(self, name: str) -> bool:
        """Return whether a setting is declared and differs from its default."""
        return name in self and self[name] != self.declared[name].default

    def shown(self, name: str) -> str:
        """Return a setting as text for a message: "seed 7 (recipes/demo.yaml:3)"."""
        return f"{name} {shown(self[name])} ({self.source(name)})"

    def build(self, argument_class: type[Arguments], **instead: Any) -> Arguments:
        """Create the dataclass from the given values, which `instead` overrides.

        Raises ConfigurationError.
        """
        own = [name for name in self.given if self.declared[name].owner is argument_class]
        try:
            return argument_class(**{**{name: self.given[name].value for name in own}, **instead})
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


# A function that reads the values of all settings and yields a line per fault.
Check = Callable[[SettingValues], Iterable[str]]


@cache
def other_names() -> dict[str, str]:
    """Return {setting of another toolkit: the name of the setting here, or advice}."""
    import yaml  # the launcher imports this module before it checks the packages

    return by_name(yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8")))


@cache
def help_file() -> dict[str, Any]:
    """Return help.yaml: the topics of `--help`, and texts for the libraries' settings."""
    import yaml  # see other_names

    return dict(yaml.safe_load(HELP.read_text(encoding="utf-8")))


def our_name(name: str, known: Collection[str]) -> str:
    """Return our name for another toolkit's setting, such as lr or optimizer.lr; "" if unknown."""
    plain = name.rpartition(".")[2]  # other toolkits have sections, as in training.steps
    ours = other_names().get(plain, plain)
    return ours if ours.partition(".")[0] in known else ""


def unknown_name(written: str, known: Iterable[str], value: str = "") -> str:
    """Return the message on an unknown setting: why it is refused, or a name that may be meant.

    `written` is "--lr" on a command line and "lr" in a recipe. `value` follows our name for it.
    """
    known, name = list(known), written.removeprefix("--")
    dashes = written.removesuffix(name)
    if name in REFUSED:
        return f"{written} cannot be set here: {REFUSED[name]}"
    switch = name.removeprefix("no_")
    if dashes and switch != name and switch in known:
        return f"unknown setting {written}: give --{switch} false"
    answers = {each: f"{dashes}{each} cannot be set here: {why}" for each, why in REFUSED.items()}
    for other, ours in other_names().items():
        if ours.partition(".")[0] in known:
            answers[other] = f"here it is {dashes}{ours}"
        elif not ours.isidentifier():
            answers[other] = ours
    plain, ours = name.rpartition(".")[2], our_name(name, known)
    exact = f"here it is {dashes}{ours}{value}" if ours else answers.get(plain)
    answers |= {each: f"did you mean {dashes}{each}?" for each in known}
    near = get_close_matches(plain, answers, n=1, cutoff=0.9)
    near = near or get_close_matches(plain, known, n=1, cutoff=0.8)
    advice = answers[near[0]] if near else "--help all lists all settings"
    return f"unknown setting {written}: {exact or advice}"
