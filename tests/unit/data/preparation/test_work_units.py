import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.config.errors import ConfigurationError
from utils.config.preparation import Source
from utils.data.prepare import plan
from utils.data.prepare.plan import cut_into_units
from utils.data.prepare.records import FilePart, Record, read_records
from utils.data.prepare.sources import SourceFile, list_sources


@given(
    lines=st.lists(st.binary(max_size=30).map(lambda b: b.hex()), max_size=30),
    cut=st.integers(1, 80),
    ends_with_newline=st.booleans(),
)
def test_every_line_is_in_exactly_one_piece_wherever_the_cuts_fall(
    tmp_path_factory, lines, cut, ends_with_newline
):
    text = "\n".join(json.dumps({"text": line}) for line in lines)
    path = tmp_path_factory.mktemp("cut") / "a.jsonl"
    path.write_text(text + "\n" * ends_with_newline)
    size = path.stat().st_size
    file = SourceFile(str(path), "jsonl", None, size, 0)
    found = []
    for start in range(0, size, cut):
        piece = FilePart(file, start, min(start + cut, size), cut)
        for record in read_records(piece, ["text"]):
            assert isinstance(record, Record)
            found.append((record.fields["text"], str(record.location)))
    assert found == [(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def test_parquet_row_groups_are_read_once_with_their_row_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "SMALLEST_UNIT_BYTES", 100)
    table = pa.table({"text": [f"row {i}" for i in range(40)], "other": range(40)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=6)
    units = cut_into_units(
        [(Source((), "train"), list_sources([str(tmp_path / "a.parquet")], "auto")[0])]
    )
    assert len(units) > 2
    assert [unit.index for unit in units] == list(range(len(units)))
    records = [
        record for unit in units for piece in unit.parts for record in read_records(piece, ["text"])
    ]
    assert [record.fields for record in records] == [{"text": f"row {i}"} for i in range(40)]
    assert str(records[33].location).endswith("a.parquet row 33")


def test_a_damaged_parquet_file_is_named_before_any_work(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing PAR1")
    files = list_sources([str(tmp_path / "bad.parquet")], "auto")[0]
    with pytest.raises(ConfigurationError, match=r"bad\.parquet: cannot be opened"):
        cut_into_units([(Source((), "train"), files)])
