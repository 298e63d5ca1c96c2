"""A small dataset as users save one, and what it holds."""

from datasets import Dataset, Features, List, Value

DOCUMENTS = [[5, 6, 7], [1], [9, 8], [4, 4, 4, 4], [2, 300]]
MASKS = [[0, 1, 1], [1], [0, 0], [1, 0, 0, 1], [0, 1]]
LABELS = [[-100, 6, 7], [1], [-100, -100], [4, -100, -100, 4], [-100, 300]]
ARROW_FILE = "data-00000-of-00001.arrow"


def save(path, input_ids=DOCUMENTS, dtype="int64", list_type=List, shards=1, **columns):
    """Write a dataset the way users do; mask columns are int8, labels int64."""
    types = {name: "int64" if name == "labels" else "int8" for name in columns}
    features = {"input_ids": list_type(Value(dtype))}
    features |= {name: list_type(Value(kind)) for name, kind in types.items()}
    dataset = Dataset.from_dict({"input_ids": input_ids, **columns}, features=Features(features))
    dataset.save_to_disk(path, num_shards=shards)
    return path


def documents_of(dataset):
    return [dataset.tokens(document).tolist() for document in range(len(dataset))]


def masks_of(dataset):
    return [dataset.loss_mask_of(document).astype(int).tolist() for document in range(len(dataset))]
