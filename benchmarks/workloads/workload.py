"""The common workload of baselines: documents, a tokenizer, and initial weights.

Documents are made on the spot: each token follows from the one before, except for some noise, so
that there is something to learn and losses tell baselines apart.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

PAD_TOKEN_ID = 1  # in no document
FIRST_WORD = 2
NOISE = 0.3
DIFFERENT_WORDS = 1000  # at most: few enough that a short run sees them again
SEED = 1

LLAMA_23M = {
    "model_type": "llama",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
LLAMA_11M = LLAMA_23M | {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Documents for a model.

    `mean_length` None: each document fills a row, so every toolkit trains on the same rows, and
    `order` says in which order. Otherwise lengths are log-normal (sigma 0.8), at most a row, and
    all but the last `loss_share` of a document is a prompt that bears no loss.
    """

    model: dict[str, Any]
    sequence_length: int
    documents: int
    mean_length: float | None = None
    loss_share: float = 2 / 3
    weights_dtype: str = "float32"

    @property
    def kind(self) -> str:
        """Whether it is pretraining or fine-tuning."""
        return "pretrain" if self.mean_length is None else "sft"


def make_workload(workload: Workload, directory: Path) -> Path:
    """Write documents/, tokenizer/, weights/ and, for pretraining, order.npy; return `directory`.

    order.npy: int64 (documents,), the document of each sample as Stoker takes them with SEED.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    documents = make_documents(workload)
    save_documents(documents, workload.kind, directory / "documents", workload.loss_share)
    make_tokenizer(int(workload.model["vocab_size"]), directory / "tokenizer")
    ids: dict[str, Any] = {"pad_token_id": PAD_TOKEN_ID, "bos_token_id": None, "eos_token_id": 0}
    config = AutoConfig.for_model(**workload.model, **ids)
    torch.manual_seed(SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, workload.weights_dtype)
        )
    model.save_pretrained(directory / "weights")
    if workload.kind == "pretrain":
        np.save(directory / "order.npy", sample_order(workload))
    (directory / "workload.json").write_text(json.dumps(dataclasses.asdict(workload)))
    return directory


def make_documents(workload: Workload) -> list[np.ndarray]:
    """Return the token ids of every document, int32."""
    random = np.random.default_rng(SEED)
    words = int(workload.model["vocab_size"]) - FIRST_WORD
    cycle = min(words, DIFFERENT_WORDS)
    lengths = document_lengths(workload, random)
    documents = []
    for length in lengths.tolist():
        starts = random.integers(0, words, size=length)
        known = random.random(length) >= NOISE
        tokens = np.empty(length, dtype=np.int32)
        token = int(starts[0])
        for place in range(length):
            token = (token * 5 + 7) % cycle if known[place] else int(starts[place])
            tokens[place] = FIRST_WORD + token
        documents.append(tokens)
    return documents


def document_lengths(workload: Workload, random: np.random.Generator) -> np.ndarray:
    """Return the tokens of each document, int64."""
    if workload.mean_length is None:
        return np.full(workload.documents, workload.sequence_length)
    sigma = 0.8
    location = np.log(workload.mean_length) - sigma**2 / 2
    lengths = random.lognormal(location, sigma, size=workload.documents)
    return np.clip(lengths, 8, workload.sequence_length).astype(np.int64)


def save_documents(
    documents: list[np.ndarray], kind: str, directory: Path, loss_share: float = 2 / 3
) -> None:
    """Save them as a `datasets` folder, as all baselines read it."""
    import datasets

    columns: dict[str, list[np.ndarray]] = {"input_ids": documents}
    if kind == "sft":
        columns["completion_mask"] = [
            (np.arange(len(tokens)) >= len(tokens) * (1 - loss_share)).astype(np.int8)
            for tokens in documents
        ]
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(columns).save_to_disk(directory)


def make_tokenizer(vocabulary_size: int, directory: Path) -> None:
    """Save a tokenizer of one word a token; nothing is tokenized with it here."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = ["<eos>", "<pad>", *(f"w{number}" for number in range(vocabulary_size - 2))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(directory)


def sample_order(workload: Workload) -> np.ndarray:
    """Return the document of each sample of Stoker's first epoch, where each fills a row."""
    from utils.data.order import SampleOrder
    from utils.data.packing import plan_packing

    lengths = np.full(workload.documents, workload.sequence_length)
    plan = plan_packing(lengths, workload.sequence_length)
    order = SampleOrder([plan.sequences], SEED).sequences(np.arange(plan.sequences))
    return plan.segments.document[plan.sequence_offsets[order]].astype(np.int64)


if __name__ == "__main__":
    # In a process of its own: what a GPU was used for is given back when it ends.
    given, where = map(Path, sys.argv[1:])
    make_workload(Workload(**json.loads(given.read_text())), where)
