"""How much of a loss head is in memory at a time, by device, and what that takes."""

import torch

from utils.config.cpu_precision import has_amx

# Logits in memory at a time: enough rows for full speed of the matrix products, no more. Products
# are slower for a number of rows that no tile divides; for each number oneDNN makes code on CPUs.
CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}
COMPILED_CHUNK_ROWS = 2048
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**29}
TILE_ROWS = {"cpu": 64, "cuda": 128}

# How many logits are in float32 at a time: for a CPU's caches 1 MiB where they lie as (V, tokens),
# else 4; two times 128 MiB on a GPU, which has no use for small blocks.
BY_WORDS_ELEMENTS = 2**18
BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}

# A GPU's fast products read rows of whole 16 bytes. With GPT-2's 50,257 words a step took twice as
# long as it had to (docs/experiments.md): the head is computed with some words of zeros more.
WORDS_TILE = {"cpu": 1, "cuda": 8}

# Rows of the weight whose gradient's product is in half precision at a time, before it is added up.
PRODUCT_WORDS = 8192


def working_bytes(tokens: int, vocabulary: int, width: int, device: str, compute_bytes: int) -> int:
    """Return what a training call takes beside its inputs: logits, softmax, weight's gradient.

    width is that of the hidden states, `compute_bytes` the size of the products' type. Not
    compiled, which takes less.
    """
    words = whole_tiles(vocabulary, device)
    tokens = whole_rows(tokens, device)
    rows = chunk_rows(tokens, words, device, compiled=False)
    buffers = softmax_buffers(device) * block_elements(rows, vocabulary, device)
    taken = words * (rows * compute_bytes + width * 4) + buffers * 4
    copied = 0 if compute_bytes == 4 and words == vocabulary else words
    widened = 0 if compute_bytes == 4 else product_words(words, device)
    return taken + (copied + widened) * width * compute_bytes


def words_first(device: str) -> bool:
    """Say whether logits lie as (V, tokens): AMX's products in bf16 are faster so."""
    return device == "cpu" and has_amx()


def whole_rows(tokens: int, device: str) -> int:
    """Return how many tokens go through the head: on a CPU whole tiles of them."""
    return -(-tokens // TILE_ROWS["cpu"]) * TILE_ROWS["cpu"] if device == "cpu" else tokens


def can_be_compiled(device: str) -> bool:
    """Say whether the softmax is better compiled: on a CPU it goes over blocks in the caches."""
    return device != "cpu"


def softmax_buffers(device: str, capped: bool = False) -> int:
    """Return how many blocks of logits in float32 the softmax takes, unless it is compiled."""
    return 1 if device == "cpu" and (words_first(device) or not capped) else 2


def whole_tiles(vocabulary: int, device: str) -> int:
    """Return how many words the head is computed with: the vocabulary's, or a few more."""
    tile = WORDS_TILE.get(device, WORDS_TILE["cuda"])
    return -(-vocabulary // tile) * tile


def product_words(words: int, device: str) -> int:
    """Return how many words' gradients are in half precision at a time; CUDA's never are."""
    return 0 if device == "cuda" else min(words, PRODUCT_WORDS)


def chunk_rows(tokens: int, words: int, device: str, compiled: bool) -> int:
    """Return how many tokens go through the head at a time: as many in each chunk, about."""
    most = CHUNK_ELEMENTS.get(device, CHUNK_ELEMENTS["cuda"]) // words
    most = min(
        COMPILED_CHUNK_ROWS if compiled else CHUNK_ROWS.get(device, CHUNK_ROWS["cuda"]), most
    )
    tile = TILE_ROWS.get(device, TILE_ROWS["cuda"])
    most = max(1, most // tile * tile)
    if compiled:
        return most  # whatever the tokens, so that one shape is compiled
    chunks = -(-tokens // most)
    rows = -(-tokens // chunks) if chunks else 1
    return min(-(-rows // tile) * tile, most)


def block_elements(rows: int, vocabulary: int, device: str) -> int:
    """Return how many logits are in float32 at a time: whole rows of words, or of tokens."""
    if words_first(device):
        return rows * min(vocabulary, max(1, BY_WORDS_ELEMENTS // rows))
    most = BLOCK_ELEMENTS.get(device, BLOCK_ELEMENTS["cuda"])
    least = torch.get_num_threads() if device == "cpu" else 1  # a row is one thread's
    return vocabulary * min(rows, max(least, most // vocabulary))
