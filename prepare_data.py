r"""Turn documents or chats into a pre-tokenized dataset.

    python prepare_data.py --config recipes/data/demo_pretrain.yaml
    python prepare_data.py --sources chats.jsonl --tokenizer_name_or_path Qwen/Qwen3-0.6B \
        --output_dir data/my-chats --validation_fraction 0.05
    python prepare_data.py --config recipes/data/smoltalk_qwen3.yaml --models Qwen/Qwen3-8B

Reads text, JSONL, JSON, CSV, Parquet, `datasets` folders or datasets of the Hub, and tokenizes
them. Writes OUTPUT_DIR/tokenizer and one dataset per split. Needs no GPU. `--offline_dir DIR` only
downloads the files that jobs without a network need. `--shard I/N` prepares one of N shares. The
last job of a Slurm array then assembles the datasets; elsewhere `--merge N` does. `--append` adds
new sources to finished datasets.
"""

import logging
import sys
from collections.abc import Sequence

from utils.launch.entry import start


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare datasets, or only download files (--offline_dir, --models); return the exit code."""
    from utils.config.preparation import parse_preparation
    from utils.host.redaction import install_redaction, load_env_file
    from utils.launch.script import configure_hub

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    arguments = parse_preparation(argv, description=__doc__.splitlines()[0])
    install_redaction()
    load_env_file()  # HF_TOKEN
    configure_hub()

    # Imported here so that --help answers at once.
    from utils.prepare.append import append
    from utils.prepare.fetch import fetch, fill_offline_dir
    from utils.prepare.pipeline import prepare_datasets

    if arguments.offline_dir is not None:
        fill_offline_dir(arguments)
        return 0
    fetch(arguments)
    if arguments.sources:  # without sources, only models are downloaded
        append(arguments) if arguments.append else prepare_datasets(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(start(main, __doc__, announced=True))
