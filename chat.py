"""Chat with the model of a run in the terminal.

    python chat.py runs/my-run
    python chat.py runs/my-run --prompt "Why is the sky blue?"
    python chat.py Qwen/Qwen3-0.6B --greedy

MODEL is the directory of a run (its final/, else its newest committed checkpoint), the directory of
a model or an adapter, or a name on the Hub. Nothing is written there. A tokenizer without a chat
template continues texts as they are. Tokens are sampled as the model's generation_config.json says,
unless flags say otherwise. Answers go to stdout, everything else to stderr.
"""

import argparse
import json
import logging
import sys
from collections.abc import Sequence

from utils.launch.entry import start


def main(argv: Sequence[str] | None = None) -> int:
    """Answer --prompt, or hold a conversation in the terminal; return the exit code."""
    from utils.launch.script import configure_environment

    configure_environment()  # before the libraries below read it
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("chat.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("model", metavar="MODEL", help="directory, or name on the Hub")
    add("--prompt", help="answer this text and exit")
    add("--system", help="system text of the conversation")
    add("--max_new_tokens", type=int, help="default: the model's own, else 2,048 (CPU: 512)")
    add("--temperature", type=float, help="default: the model's own; 0 is --greedy")
    add("--top_p", type=float, help="default: the model's own")
    add("--greedy", action="store_true", help="take the most likely token each time")
    add("--seed", type=int, default=0, help="of the sampling (default: 0)")
    add("--device", help="cpu, cuda, cuda:1, or auto: all GPUs (default: cuda if there is one)")
    add("--dtype", default="auto", help="float32, bfloat16, ... (default: as weights were saved)")
    kwargs = "variables of the chat template, such as '{\"enable_thinking\": false}'"
    add("--chat_template_kwargs", type=json.loads, default={}, metavar="JSON", help=kwargs)
    options = parser.parse_args(argv)
    if options.greedy and (options.temperature or options.top_p):
        parser.error("--greedy: --temperature and --top_p have no effect with it")
    if (options.max_new_tokens or 1) < 1:
        parser.error("--max_new_tokens: give at least 1")
    if not isinstance(options.chat_template_kwargs, dict):
        parser.error("--chat_template_kwargs: give a JSON object")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    from utils.launch.signals import CTRL_C_CODE
    from utils.run.chat import ChatModel, opening, talk

    model = ChatModel(options)
    if options.prompt is None:
        talk(model, options.system)
        return 0
    model.answer([*opening(options.system), {"role": "user", "content": options.prompt}])
    return CTRL_C_CODE if model.interrupted else 0


if __name__ == "__main__":
    sys.exit(start(main, __doc__, announced=True))
