"""Token files: Arrow streams of token lists in the layout of `datasets`' save_to_disk."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa

from utils.data.preparation.tokenization import TokenizedDocument

# Tokens per record batch. Few large batches keep the reader's table of chunks short; the batch is
# what a writer holds in memory (2 to 4 bytes a token, and 1 for its mask).
TOKENS_PER_BATCH = 1 << 20


class TokenFileWriter:
    """Writes tokenized documents to one Arrow stream; a context manager that closes the file.

    The bytes depend on the documents alone. `mask_column` None: the dataset has no mask.
    """

    def __init__(self, path: Path, id_type: np.dtype, mask_column: str | None):
        self._documents: list[TokenizedDocument] = []
        self._tokens = 0
        self._mask_column = mask_column
        self._schema = token_schema(id_type, mask_column)
        self._file = path.open("wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)

    def append(self, document: TokenizedDocument) -> None:
        """Add one document behind those before it."""
        self._documents.append(document)
        self._tokens += len(document.ids)
        if self._tokens >= TOKENS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        if not self._documents:
            return
        lengths = [len(document.ids) for document in self._documents]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        columns = [_lists(offsets, [document.ids for document in self._documents])]
        if self._mask_column:
            masks = [d.loss_mask for d in self._documents if d.loss_mask is not None]
            columns.append(_lists(offsets, masks))
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._documents, self._tokens = [], 0

    def __enter__(self) -> "TokenFileWriter":
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error_type is None:
            self._flush()
            self._stream.close()
            self._file.flush()
            # The file counts as done once it is renamed: its content must be on disk by then.
            os.fsync(self._file.fileno())
        self._file.close()


def token_schema(id_type: np.dtype, mask_column: str | None) -> pa.Schema:
    """Return the Arrow schema of a split, with the features that `datasets` reads from it."""
    fields = [pa.field("input_ids", pa.list_(pa.from_numpy_dtype(id_type)))]
    if mask_column:
        fields.append(pa.field(mask_column, pa.list_(pa.int8())))
    info = {"info": {"features": _features(id_type, mask_column)}}
    return pa.schema(fields, metadata={"huggingface": json.dumps(info)})


def write_layout(
    directory: Path, files: Sequence[str], id_type: np.dtype, mask_column: str | None, digest: str
) -> None:
    """Write dataset_info.json and state.json, which make the Arrow files a `datasets` folder.

    `digest` becomes the fingerprint under which `datasets` caches what is derived from the split.
    """
    info = {
        "citation": "",
        "description": "",
        "features": _features(id_type, mask_column),
        "homepage": "",
        "license": "",
    }
    state: dict[str, object] = {
        "_data_files": [{"filename": name} for name in files],
        "_fingerprint": digest[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (directory / "dataset_info.json").write_text(json.dumps(info, indent=2), encoding="utf-8")
    (directory / "state.json").write_text(json.dumps(state, indent=2), encoding="utf-8")


def _lists(offsets: pa.Array, values: Sequence[np.ndarray]) -> pa.ListArray:
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values)))


def _features(id_type: np.dtype, mask_column: str | None) -> dict[str, object]:
    def list_of(dtype: str) -> dict[str, object]:
        return {"feature": {"dtype": dtype, "_type": "Value"}, "_type": "List"}

    features: dict[str, object] = {"input_ids": list_of(id_type.name)}
    if mask_column:
        features[mask_column] = list_of("int8")
    return features
