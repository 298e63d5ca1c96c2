"""A small dataset, saved as a user would save it, and its contents."""

import numpy as np
from datasets import Dataset, Features, List, Value

from utils.data.packing import Segments

DOCUMENTS = [[5, 6, 7], [1], [9, 8], [4, 4, 4, 4], [2, 300]]
MASKS = [[0, 1, 1], [1], [0, 0], [1, 0, 0, 1], [0, 1]]
LABELS = [[-100, 6, 7], [1], [-100, -100], [4, -100, -100, 4], [-100, 300]]
ARROW_FILE = "data-00000-of-00001.arrow"


def save(path, input_ids=DOCUMENTS, dtype="int64", list_type=List, shards=1, **columns):
    """Save a dataset as a user would; mask columns are int8, labels int64."""
    types = {name: "int64" if name == "labels" else "int8" for name in columns}
    features = {"input_ids": list_type(Value(dtype))}
    features |= {name: list_type(Value(kind)) for name, kind in types.items()}
    dataset = Dataset.from_dict({"input_ids": input_ids, **columns}, features=Features(features))
    dataset.save_to_disk(path, num_shards=shards)
    return path


def documents_of(dataset):
    return [ids.tolist() for ids in _pieces(dataset)[0]]


def masks_of(dataset):
    return [mask.astype(int).tolist() for mask in _pieces(dataset)[1]]


def _pieces(dataset):
    documents = np.arange(len(dataset))
    return dataset.pieces(Segments(documents, np.zeros_like(documents), dataset.lengths))
