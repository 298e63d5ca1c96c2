"""Names of functions in a checkpoint's pickles are read, and the functions do not run."""

import pickle
from pathlib import Path

import payloads
import pytest
import torch

from utils.checkpoints.files import list_files
from utils.checkpoints.pickles import allow_known_classes, forbidden


def problems(directory: Path) -> dict[str, str]:
    allow_known_classes("single")
    found = {name: forbidden(directory / name) for name in list_files(directory)}
    return {name: reason for name, reason in found.items() if reason}


@pytest.mark.parametrize("name", payloads.PAYLOADS)
def test_a_payload_is_named_and_not_run(name, tmp_path):
    touched = tmp_path / "touched"
    checkpoint = tmp_path / "checkpoint-2"
    payloads.write(checkpoint, name, payloads.Touch(touched))
    found = problems(checkpoint)
    assert not touched.exists()
    reasons = {
        "nested/optimizer.pt": "names torch.storage._load_from_bytes, which no checkpoint needs",
        "custom_checkpoint_0.pkl": "is nothing that torch.save writes",
    }
    assert found.keys() == {name}
    assert found[name].startswith(reasons.get(name, "names posix.system, which no checkpoint"))


def test_cut_files_archives_of_code_and_metadata_of_another_shape_are_refused(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"storage_data": {}}))
    torch.save(torch.zeros(300), tmp_path / "optimizer.pt")
    whole = (tmp_path / "optimizer.pt").read_bytes()
    for size in (0, 200):
        (tmp_path / "optimizer.pt").write_bytes(whole[:size])
        found = problems(tmp_path)
        assert found.keys() == {"model.pt", ".metadata", "optimizer.pt"}
        assert "nothing that torch.save writes" in found["optimizer.pt"]


def test_nothing_is_imported_for_a_name_and_the_check_is_needed(tmp_path, monkeypatch):
    """A pickle that names a package does not import it from the job's working directory."""
    touched = tmp_path / "touched"
    (tmp_path / "intruder.py").write_text(f"open({str(touched)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(b"cintruder\nThing\n.")
    assert "names intruder.Thing" in problems(tmp_path)[".metadata"]
    assert not touched.exists()
    with pytest.raises(AttributeError):
        pickle.loads(metadata.read_bytes())
    assert touched.exists()
