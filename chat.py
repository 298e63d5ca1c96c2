"""Talk to the model that a run left, or let it answer a file of prompts.

    python chat.py runs/my-run
    python chat.py runs/my-run --prompt "Why is the sky blue?"
    python chat.py Qwen/Qwen3-0.6B --prompts questions.jsonl --output answers.jsonl

MODEL is the directory of a run (its final/, else its newest committed checkpoint), of a model or of
an adapter, or a name on the Hub; nothing is written there. A tokenizer without a chat template
continues texts as they are. Tokens are sampled as the model's generation_config.json says, unless
flags say otherwise. Answers go to stdout, everything else to stderr.
"""

import argparse
import contextlib
import json
import logging
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from utils.checkpoints.discovery import how_to_rewrite, resume_point
from utils.checkpoints.files import FINAL
from utils.checkpoints.record import RunRecord
from utils.config.errors import ConfigurationError
from utils.data.prepare.rows import document_fields
from utils.launch.script import configure_environment, run_script
from utils.support.foreign import RENDERING_BYTES, foreign, limits, read_object
from utils.support.redaction import redact

COMMANDS = "/reset forgets the conversation, /system TEXT sets its system text, /quit leaves"
ADAPTER = "adapter_config.json"
MAX_NEW_TOKENS = 2048  # where neither a flag nor the model says
# `messages`, perhaps `tools` and `chat_template_kwargs`, and what else a record has.
Chat = dict[str, Any]
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one prompt, a file of them, or a person; returns the exit code."""
    configure_environment()  # before the libraries below read it
    given = parse_arguments(argv)
    # PEFT's, of what it asks transformers itself.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    chats = read_chats(given)  # before the weights, which may take minutes
    with contextlib.suppress(KeyboardInterrupt):
        model = ChatModel(given)
        if given.prompts:
            answer_file(model, chats, given)
        elif chats:
            model.answer([model.rendered(chats[0])], streamed=True)
        else:
            talk(model, given)
        return 0
    return 128 + signal.SIGINT


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; raises ConfigurationError for values that cannot work."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("chat.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory, or name on the Hub")
    add("--prompt", help="answer this text and exit")
    add("--prompts", type=Path, help="answer a file: .jsonl with `messages` or `prompt`, or lines")
    add("--output", type=Path, help="JSONL file for the answers to --prompts (default: stdout)")
    add("--batch_size", type=int, default=8, help="how many of --prompts at once (default: 8)")
    add("--system", help="system text of chats that have none")
    add("--max_new_tokens", type=int, help=f"default: the model's own, else {MAX_NEW_TOKENS:,}")
    add("--temperature", type=float, help="default: the model's own; 0 is --greedy")
    add("--top_p", type=float, help="default: the model's own")
    add("--greedy", action="store_true", help="take the most likely token each time")
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--device", help="cpu, cuda, cuda:1, or auto: all GPUs (default: cuda if there is one)")
    add("--dtype", default="auto", help="float32, bfloat16, ... (default: as weights were saved)")
    kwargs = "variables of the chat template, such as '{\"enable_thinking\": false}'"
    add("--chat_template_kwargs", type=json.loads, default={}, metavar="JSON", help=kwargs)
    given = parser.parse_args(argv)
    given.greedy = given.greedy or given.temperature == 0
    faults = {
        "--prompt has no effect: --prompts": given.prompt is not None and given.prompts,
        "--output has no effect without --prompts": given.output and not given.prompts,
        "--temperature has no effect: --greedy": given.greedy and given.temperature,
        "--top_p has no effect: --greedy": given.greedy and given.top_p is not None,
        "--temperature: give 0 or more": (given.temperature or 0) < 0,
        "--top_p: give a share above 0, up to 1": not 0 < (given.top_p or 1) <= 1,
        "--batch_size: give at least 1": given.batch_size < 1,
        "--max_new_tokens: give at least 1": (given.max_new_tokens or 1) < 1,
        "--chat_template_kwargs: give a JSON object": type(given.chat_template_kwargs) is not dict,
    }
    if problems := [fault for fault, holds in faults.items() if holds]:
        raise ConfigurationError(problems)
    return given


def read_chats(given: argparse.Namespace) -> list[Chat]:
    """Return what is to be answered; raises ConfigurationError with the fault of every line."""
    path, chats, problems = given.prompts, [], []
    lines = [] if given.prompt is None else [given.prompt]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--prompts {path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                is_json = path is not None and path.suffix == ".jsonl"
                chats.append(as_chat(json.loads(line) if is_json else {"prompt": line}, given))
        except ValueError as error:
            problems.append(f"{path or '--prompt'}:{number}: {error}")
    if problems or (lines and not chats):
        raise ConfigurationError(problems or f"{path or '--prompt'} asks nothing.")
    return chats


def as_chat(fields: Any, given: argparse.Namespace) -> Chat:
    """Return a record's chat; an answer that it ends in becomes its `reference`. ValueError."""
    if not isinstance(fields, dict) or not {"messages", "prompt"} & fields.keys():
        raise ValueError("give an object with `messages` or `prompt`")
    key = "messages" if "messages" in fields else "prompt"
    asked = fields[key]
    asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    chat = {**fields, **document_fields(fields | {key: asked}, "messages", [(key, "messages")])}
    messages = chat["messages"] = list(chat["messages"])
    if given.system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": given.system})
    if messages[-1]["role"] == "assistant":
        chat["reference"] = messages.pop()["content"]
    if not messages:
        raise ValueError("nothing comes before the answer")
    options = given.chat_template_kwargs | (chat["chat_template_kwargs"] or {})
    chat["chat_template_kwargs"] = options or None
    return {name: value for name, value in chat.items() if value is not None}


def find_model(name: str) -> str:
    """Return the folder of the weights that `name` stands for, or a name on the Hub.

    Raises ConfigurationError where there are none, StorageError where all checkpoints are damaged.
    """
    directory = Path(name)
    if not directory.is_dir():
        hub_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name)
        if not hub_name or ("/" in name and directory.parent.is_dir()):
            raise ConfigurationError(
                f"{name}: no such directory. Give that of a run (its output_dir), of a model or of "
                "an adapter, or a model's name on the Hub."
            )
        return name
    if any((directory / file).is_file() for file in ("config.json", ADAPTER)):
        return name
    if (directory / FINAL).is_dir():
        return str(directory / FINAL)
    run_id = RunRecord(directory).run_id
    found = resume_point(directory, run_id, dry_run=True) if run_id else None
    if found is None or not any(found.glob("*.safetensors")):
        raise ConfigurationError(
            f"{found} holds the weights in shards, a part for each rank: wait for {FINAL}/."
            if found
            else f"{name} holds no model (config.json), no adapter ({ADAPTER}) and no run with "
            f"{FINAL}/ or a committed checkpoint; `touch {directory / 'SAVE'}` asks a run for one."
        )
    say(f"{name} has no {FINAL}/ yet: {found.name}, its newest committed checkpoint, answers.")
    return str(found)


def load(path: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    """Return model and tokenizer; raises ConfigurationError with what is missing or unreadable."""
    import torch
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import find_adapter_config_file

    from utils.model.adapters import load_adapter
    from utils.model.architecture import causal_lm_class, without_weights
    from utils.model.finished_model import check_token_ids
    from utils.model.weights import check_without_loading
    from utils.model.xlstm import accept_kernel_names, choose_kernels

    base, config = path, {}
    with foreign(path, f"the model cannot be loaded{how_to_rewrite(path)}"):
        if adapter := find_adapter_config_file(path):
            config = read_object(Path(adapter))
            base = find_model(config["base_model_name_or_path"])
            say(f"{path} is an adapter of {base}.")
        bare = Path(path).is_dir() and not any(Path(path).glob("tokenizer*"))
        tokenizer = AutoTokenizer.from_pretrained(
            base if bare else path, padding_side="left", trust_remote_code=False
        )
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        accept_kernel_names()
        model_config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        choose_kernels(model_config, torch.device(device).type)
        without_weights(model_config)  # refuses one that takes hours to build
        if not hasattr(model_config, "quantization_config"):  # else its tensors have other shapes
            check_without_loading(base, exact=False, config=model_config)
        loaded: Any = causal_lm_class(model_config).from_pretrained(
            base, config=model_config, dtype=dtype, device_map=device, output_loading_info=True
        )
        model, info = loaded
        check_token_ids(model.generation_config)
        if config.get("trainable_token_indices"):  # as many rows as training gave the new tokens
            model.resize_token_embeddings(
                len(tokenizer), pad_to_multiple_of=64, mean_resizing=False
            )
        if adapter:
            model = load_adapter(model, path, Path(adapter))
    if missing := sorted(info["missing_keys"]):
        raise ConfigurationError(f"{base} lacks tensors of the model: {', '.join(missing[:5])}.")
    return model.eval(), tokenizer


class ChatModel:
    """A model with its tokenizer and chat template (None: it continues texts)."""

    def __init__(self, given: argparse.Namespace):
        """Load what `given` names and settle how it generates; raises as `load` does."""
        path = self.path = find_model(given.model)
        import transformers

        from utils.data.prepare.chat_templates import ChatTemplate
        from utils.data.prepare.tokenizer import end_of_turn_id

        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        transformers.set_seed(given.seed)
        self.model, tokenizer = load(path, given.device, given.dtype)
        self.tokenizer, self.template = tokenizer, None
        self.settings = settings = self.model.generation_config
        known = settings.eos_token_id
        ends = [*(known if isinstance(known, list) else [known]), tokenizer.eos_token_id]
        if tokenizer.chat_template is not None:
            self.template = ChatTemplate(tokenizer)
            slow = limits(f"{path}: its chat template", RENDERING_BYTES)
            with slow, contextlib.suppress(Exception):  # of one that could not be trained with
                ends.append(end_of_turn_id(tokenizer))  # checkpoints do not have it in their files
        settings.eos_token_id = list(dict.fromkeys(end for end in ends if end is not None))
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        settings.pad_token_id = tokenizer.pad_token_id
        settings.use_cache, settings.max_length = True, None  # checkpoints have the cache off
        settings.max_new_tokens = given.max_new_tokens or settings.max_new_tokens or MAX_NEW_TOKENS
        asked = {name: getattr(given, name, None) or getattr(settings, name) for name in SAMPLING}
        sampled = settings.do_sample or given.temperature or given.top_p
        settings.do_sample = bool(sampled and not given.greedy)
        settings.update(**(asked if settings.do_sample else dict.fromkeys(SAMPLING)))
        set_to = [f"{name} {value:g}" for name in SAMPLING if (value := getattr(settings, name))]
        how = ", ".join(set_to) or ("sampled" if settings.do_sample else "greedy")
        say(
            f"{path}: {self.model.num_parameters() / 1e6:,.1f} M parameters, {self.model.dtype} on "
            f"{self.model.device}; {how}; at most {settings.max_new_tokens:,} new tokens."
        )

    def rendered(self, chat: Chat) -> str:
        """Return the text that the model is to continue; raises ConfigurationError."""
        from utils.data.prepare.chat_templates import PROBE
        from utils.data.prepare.rows import ChatDocument

        messages, tools, options = map(chat.get, ("messages", "tools", "chat_template_kwargs"))
        assert messages, "as_chat sees to it"
        asked = f"{messages[-1]['content']!r:.40} cannot be asked"
        if self.template is not None:
            with foreign(self.path, f"{asked}, its chat template refuses it"):
                adapted = self.template.adapted(messages)
                return self.template.render(ChatDocument(adapted, PROBE, tools, options), True)
        if len(messages) > 1 or tools or options:
            raise ConfigurationError(
                f"{asked}: without a chat template the model continues one text; it takes no "
                "system text, earlier messages, tools or --chat_template_kwargs."
            )
        return str(messages[0]["content"])

    def answer(self, texts: Sequence[str], *, streamed: bool = False) -> list[str]:
        """Return what the model says after each text; one alone is `streamed`, Ctrl-C ends it.

        Raises ConfigurationError where the model or the device has no room for it.
        """
        import torch
        from transformers import TextStreamer

        from utils.data.prepare.encoding import prompt_ids

        if self.template is None:
            ids = [prompt_ids(self.tokenizer, text) for text in texts]
        else:  # it prints the special tokens itself
            ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        inputs = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(self.model.device)
        length, room = inputs["input_ids"].shape[1], self.settings.max_new_tokens
        if positions := getattr(self.model.config.get_text_config(), "max_position_embeddings", 0):
            room = min(room, positions - length)
        if not length or room < 1:
            raise ConfigurationError(
                f"{self.path}: {length:,} tokens do not fit {positions:,} positions."
            )
        watched: dict[str, Any] = {}
        pressed: list[bool] = []
        before = signal.getsignal(signal.SIGINT)
        if streamed:
            words = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
            watched = {
                "streamer": words,
                "stopping_criteria": [
                    lambda ids, *_, **__: torch.full(ids.shape[:1], bool(pressed)).to(ids.device)
                ],
            }
            signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
        try:
            with foreign(self.path, "the model does not generate"):
                output = self.model.generate(**inputs, **watched, max_new_tokens=room)[:, length:]
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                "out of GPU memory: a smaller --batch_size or --max_new_tokens, or --device auto."
            ) from error
        finally:
            signal.signal(signal.SIGINT, before)
        ends = torch.tensor(self.settings.eos_token_id, device=output.device)
        if cut := int((~torch.isin(output, ends).any(dim=1)).sum()):
            say(f"[{cut} of {len(texts)} not finished after {output.shape[1]:,} tokens]")
        answers = self.tokenizer.batch_decode(output, skip_special_tokens=True)
        if empty := sum(not answer.strip() for answer in answers):
            say(f"[{empty} of {len(texts)} answers are empty: the model ended at once]")
        return answers


def answer_file(model: ChatModel, chats: Sequence[Chat], given: argparse.Namespace) -> None:
    """Write each chat with its answer as a line of JSON, a batch at a time."""
    texts, size = [model.rendered(chat) for chat in chats], given.batch_size
    target = given.output.open("w", encoding="utf-8") if given.output else sys.stdout
    with contextlib.nullcontext(target) if target is sys.stdout else target as file:
        for start in range(0, len(chats), size):
            answers = model.answer(texts[start : start + size])
            for chat, answer in zip(chats[start : start + size], answers, strict=True):
                messages = [*chat["messages"], {"role": "assistant", "content": answer}]
                file.write(json.dumps(chat | {"messages": messages}, ensure_ascii=False) + "\n")
            file.flush()
            say(f"{start + len(answers):,} of {len(chats):,} answered")


def talk(model: ChatModel, given: argparse.Namespace) -> None:
    """Answer what is typed, line by line, until /quit, Ctrl-D or the end of stdin."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited and come back

    say(f"{COMMANDS}; Ctrl-C ends an answer" if model.template else "/quit leaves")
    said: list[Any] = []
    while True:
        try:
            text = input("> " if sys.stdin.isatty() else "").strip()
            command, _, rest = text.partition(" ")
            if command == "/quit":
                return
            if command in ("/reset", "/system"):
                said, given.system = [], rest if command == "/system" else given.system
            elif re.fullmatch("/[a-z]+", command):
                say(f"{command} is no command: {COMMANDS}")
            elif text:
                asked = [*said, {"role": "user", "content": text}]
                rendered = model.rendered(as_chat({"messages": asked}, given))
                (answer,) = model.answer([rendered], streamed=True)
                said = [*asked, {"role": "assistant", "content": answer}] if model.template else []
        except EOFError:
            return
        except KeyboardInterrupt:
            say("")
        except ValueError as error:
            say(str(error))


def say(text: str) -> None:
    """Write a line that is no answer."""
    sys.stderr.write(f"{redact(text)}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(run_script(main))
