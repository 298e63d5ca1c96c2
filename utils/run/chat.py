"""chat.py: conversations on a terminal with the model of a run, a checkpoint or an adapter."""

import argparse
import contextlib
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer, TextStreamer
from transformers.utils import find_adapter_config_file

from utils.checkpoints.discovery import how_to_rewrite, resume_point
from utils.checkpoints.files import FINAL
from utils.checkpoints.record import RunRecord
from utils.config.errors import ConfigurationError, did_you_mean
from utils.host.foreign import RENDERING_BYTES, library_errors, read_object, resource_limits
from utils.host.hub import use_cache_if_offline
from utils.host.redaction import redact
from utils.model.adapters import load_adapter
from utils.model.architecture import (
    accept_xlstm_kernels,
    causal_lm_class,
    check_memory_room,
    choose_xlstm_kernels,
    without_weights,
)
from utils.model.finished_model import check_token_ids
from utils.model.weights import check_without_loading
from utils.prepare.chat_templates import PROBE_LOCATION, ChatTemplate
from utils.prepare.encoding import prompt_ids
from utils.prepare.rows import ChatDocument
from utils.prepare.tokenizer import end_of_turn_id

COMMANDS_HELP = "/reset forgets the conversation, /system TEXT sets its system text, /quit leaves"
ADAPTER_FILE = "adapter_config.json"
# Default limits, which a flag or the model can override. On a CPU 2,048 tokens take minutes.
MAX_NEW_TOKENS, MAX_NEW_TOKENS_ON_CPU = 2048, 512
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")
Messages = list[dict[str, str]]


def find_model(name: str) -> str:
    """Return the folder with the weights of the model `name`; return a Hub name unchanged.

    name: a folder with a model or an adapter, a name on the Hub or a run's output_dir. For a run,
    return final/ or, before final/ exists, the newest checkpoint. Raises ConfigurationError if
    there are no weights, and StorageError if all checkpoints are damaged.
    """
    directory = Path(name)
    if not directory.is_dir():
        hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
        if not hub_name or ("/" in name and directory.parent.is_dir()):
            raise ConfigurationError(
                f"{name}: no such directory{did_you_mean(name)}. Give that of a run (its "
                "output_dir), of a model or of an adapter, or a model's name on the Hub."
            )
        return name
    if any((directory / file).is_file() for file in ("config.json", ADAPTER_FILE)):
        return name
    if (directory / FINAL).is_dir():
        return str(directory / FINAL)
    run_id = RunRecord(directory).run_id
    found = resume_point(directory, run_id, dry_run=True) if run_id else None
    if found is None or not any(found.glob("*.safetensors")):
        raise ConfigurationError(
            f"{found} holds the weights in shards, a part for each rank: wait for {FINAL}/."
            if found
            else f"{name} holds no model (config.json), no adapter ({ADAPTER_FILE}) and no run "
            f"with {FINAL}/ or a committed checkpoint; `touch {directory / 'SAVE'}` asks a run for "
            "one."
        )
    print_note(
        f"{name} has no {FINAL}/ yet: {found.name}, its newest committed checkpoint, answers."
    )
    return str(found)


def load(path: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Load a model or adapter from a folder or a Hub name; return (model, tokenizer).

    The model is in evaluation mode. device: None means a GPU if there is one, else the CPU. dtype:
    the argument of from_pretrained. Raises ConfigurationError if a file is missing or unreadable.
    """
    base, config = path, {}
    use_cache_if_offline(path)
    with library_errors(path, f"the model cannot be loaded{how_to_rewrite(path)}"):
        if adapter := find_adapter_config_file(path):
            config = read_object(Path(adapter))
            base = find_model(config["base_model_name_or_path"])
            print_note(f"{path} is an adapter of {base}.")
            use_cache_if_offline(base)
        lacks_tokenizer = Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))
        tokenizer = AutoTokenizer.from_pretrained(
            base if lacks_tokenizer else path, padding_side="left", trust_remote_code=False
        )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        accept_xlstm_kernels()
        model_config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        choose_xlstm_kernels(model_config, torch.device(device).type)
        meta_model = without_weights(model_config)  # refuses a model that would take hours to build
        if not hasattr(model_config, "quantization_config"):  # else its tensors have other shapes
            check_without_loading(base, exact=False, config=model_config)
            weights = meta_model.num_parameters() * getattr(model_config.dtype, "itemsize", 4)
            check_memory_room(weights if device == "cpu" else 0, f"{base}: its weights take")
        loaded: Any = causal_lm_class(model_config).from_pretrained(
            base, config=model_config, dtype=dtype, device_map=device, output_loading_info=True
        )
        model, info = loaded
        check_token_ids(model.generation_config)
        if config.get("trainable_token_indices"):  # training added rows for new tokens
            model.resize_token_embeddings(
                len(tokenizer), pad_to_multiple_of=64, mean_resizing=False
            )
        if adapter:
            model = load_adapter(model, path, Path(adapter))
    if missing := sorted(info["missing_keys"]):
        raise ConfigurationError(f"{base} lacks tensors of the model: {', '.join(missing[:5])}.")
    return model.eval(), tokenizer


class Printer(TextStreamer):
    """A streamer for `generate` that prints an answer piece by piece and collects it in `text`."""

    text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print the next piece of the answer, and add the piece to the collected text."""
        self.text += text
        super().on_finalized_text(text, stream_end)


class ChatModel:
    """A model with its tokenizer and chat template. Without a template, the model continues a text.

    interrupted: whether Ctrl-C ended the last answer early.
    """

    interrupted = False

    def __init__(self, given: argparse.Namespace):
        """Load the model and set its generation options. Raises ConfigurationError.

        given: the parsed flags of chat.py.
        """
        # PEFT causes this warning.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        transformers.set_seed(given.seed)
        self.path = find_model(given.model)
        self.variables = given.chat_template_kwargs or None
        self.model, self.tokenizer = load(self.path, given.device, given.dtype)
        templated = self.tokenizer.chat_template is not None
        self.template = ChatTemplate(self.tokenizer) if templated else None
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.settings = settings = self.model.generation_config
        known = settings.eos_token_id
        end_ids = [*(known if isinstance(known, list) else [known]), self.tokenizer.eos_token_id]
        if templated:  # checkpoints do not list the token that ends a turn
            slow = resource_limits(f"{self.path}: its chat template", RENDERING_BYTES)
            with slow, contextlib.suppress(Exception):  # some templates do not work in training
                end_ids.append(end_of_turn_id(self.tokenizer))
        settings.eos_token_id = list(dict.fromkeys(end for end in end_ids if end is not None))
        settings.pad_token_id = self.tokenizer.pad_token_id
        settings.use_cache, settings.max_length = True, None  # training turns the cache off
        default_limit = MAX_NEW_TOKENS_ON_CPU if self.model.device.type == "cpu" else MAX_NEW_TOKENS
        settings.max_new_tokens = given.max_new_tokens or settings.max_new_tokens or default_limit
        if given.greedy or given.temperature == 0:
            settings.do_sample = False
        elif given.temperature or given.top_p:
            settings.do_sample = True
            settings.temperature = given.temperature or settings.temperature
            settings.top_p = given.top_p or settings.top_p
        if not settings.do_sample:
            settings.update(**dict.fromkeys(SAMPLING))
        print_note(
            f"{self.path}: {self.model.num_parameters() / 1e6:,.1f} M parameters, "
            f"{self.model.dtype} on {self.model.device}; "
            f"{'sampled' if settings.do_sample else 'greedy'}; at most "
            f"{settings.max_new_tokens:,} new tokens."
        )

    def rendered(self, messages: Messages) -> str:
        """Render `messages` with the chat template, and return the prompt as text.

        Without a template, return the text of the only message. Raises ConfigurationError if the
        template refuses the messages, or if a model without a template gets several messages.
        """
        problem = f"{messages[-1]['content']!r:.40} cannot be asked"
        if self.template is not None:
            with library_errors(self.path, f"{problem}, its chat template refuses it"):
                adapted = self.template.adapted(messages)
                chat = ChatDocument(adapted, PROBE_LOCATION, None, self.variables)
                return self.template.render(chat, True)
        if len(messages) > 1 or self.variables:
            raise ConfigurationError(
                f"{problem}: without a chat template the model continues one text; it takes no "
                "system text, earlier messages or --chat_template_kwargs."
            )
        return messages[0]["content"]

    def answer(self, messages: Messages) -> str:
        """Generate and print an answer to `messages`, and return the answer's text.

        Ctrl-C ends the answer early. Raises ConfigurationError if the prompt is longer than the
        model allows, or if memory runs out.
        """
        text = self.rendered(messages)
        if self.template is None:
            ids = prompt_ids(self.tokenizer, text)
        else:  # the template has added the special tokens
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        most = self.settings.max_new_tokens
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", 0)
        room = min(most, positions - len(ids)) if positions else most
        if not ids or room < 1:
            raise ConfigurationError(
                f"{self.path}: {len(ids):,} tokens do not fit {positions:,} positions."
            )
        inputs = self.tokenizer.pad({"input_ids": [ids]}, return_tensors="pt")
        printer = Printer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.interrupted = False
        try:
            with library_errors(self.path, "the model does not generate"):
                output = self.model.generate(
                    **inputs.to(self.model.device), max_new_tokens=room, streamer=printer
                )[0, len(ids) :]
            if not set(output.tolist()) & set(self.settings.eos_token_id):
                limit = f"--max_new_tokens {2 * most} allows more"
                if room < most:
                    limit = f"the model has {positions:,} positions, /reset forgets earlier ones"
                print_note(f"[not finished after {len(output):,} tokens: {limit}]")
            if not printer.text.strip():
                print_note("[the answer is empty: the model ended at once]")
        except KeyboardInterrupt:
            self.interrupted = True
            printer.end()
            print_note("[not finished: Ctrl-C]")
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                "out of GPU memory: a smaller --max_new_tokens, or --device auto."
            ) from error
        return printer.text


def opening(system: str | None) -> Messages:
    """Return the first messages of a conversation: the system message, or [] without one."""
    return [{"role": "system", "content": system}] if system else []


def talk(model: ChatModel, system: str | None) -> None:
    """Answer each line of stdin, until /quit, Ctrl-D or the end of stdin.

    system: the text of the system message. None means no system message.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited and recalled

    print_note(
        f"{COMMANDS_HELP}; Ctrl-C ends an answer, or the chat" if model.template else "/quit leaves"
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # each Ctrl-C ends one answer
    messages = opening(system)
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
            command, _, rest = text.partition(" ")
            if command == "/quit":
                return
            if command in ("/reset", "/system"):
                system = rest if command == "/system" else system
                messages = opening(system)
            elif re.fullmatch("/[a-z]+", command):
                print_note(f"{command} is no command: {COMMANDS_HELP}")
            elif text:
                question = [*messages, {"role": "user", "content": text}]
                answer = model.answer(question)
                if model.template:
                    messages = [*question, {"role": "assistant", "content": answer}]
        except EOFError:
            return
        except ValueError as error:
            print_note(str(error))


def print_note(text: str) -> None:
    """Write a line to stderr. Only answers go to stdout."""
    sys.stderr.write(f"{redact(text)}\n")
    sys.stderr.flush()
