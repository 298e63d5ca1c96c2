"""What a checkpoint's pickles name is read without being run."""

import contextlib
import pickle
import random
import zipfile
from pathlib import Path

import numpy as np
import payloads
import pytest
import torch

from utils.checkpoints import pickles

BARE = (
    "bare/optimizer.pt",
    "custom_checkpoint_0.pkl",
    "legacy/optimizer.pt",
    "python2/scheduler.pt",
)


def naively_loaded(path: Path) -> None:
    """Load a file as the libraries do that have no guard."""
    with contextlib.suppress(Exception):
        if path.name == ".metadata":
            pickle.loads(path.read_bytes())
            torch.load(path.parent / "__0_0.distcp", weights_only=False)
        elif path.parent.name != "legacy" and str(path).endswith(BARE):
            pickle.loads(path.read_bytes())
        else:
            torch.load(path, weights_only=False)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", payloads.PAYLOADS)
def test_a_payload_is_named_and_not_run(name, tmp_path):
    touched = tmp_path / "touched"
    checkpoint = tmp_path / "checkpoint-2"
    path = payloads.write(checkpoint, name, payloads.Touch(touched))
    problems = pickles.check(checkpoint)
    assert not touched.exists()
    assert [problem.split()[0] for problem in problems] == [name]
    reasons = {
        "nested/optimizer.pt": "names torch.storage._load_from_bytes, which no checkpoint needs",
        **dict.fromkeys(BARE, "is no archive of torch.save"),
    }
    assert reasons.get(name, "names posix.system, which no checkpoint needs") in problems[0]
    naively_loaded(path)
    assert touched.exists(), "the payload itself does nothing"


def harmless(directory: Path) -> None:
    """What Trainer saves: optimizer, schedule, scaler and random states."""
    directory.mkdir()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.save(optimizer.state_dict(), directory / "optimizer.pt")
    torch.save(schedule.state_dict(), directory / "scheduler.pt")
    torch.save({"scale": 65536.0, "_growth_tracker": 0}, directory / "scaler.pt")
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    torch.save(states, directory / "rng_state.pth")
    for kind in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        torch.save({"w": torch.nn.Parameter(torch.zeros(2).to(kind), False)}, directory / f"{kind}")
    (directory / "trainer_state.json").write_text("{}")
    (directory / "latest").write_text("global_step2")


def test_what_trainer_saves_is_read_without_objection(tmp_path):
    harmless(tmp_path / "checkpoint-2")
    assert pickles.check(tmp_path / "checkpoint-2") == []


def test_sharded_state_is_read_part_by_part(tmp_path):
    payloads.sharded(tmp_path / ".metadata", "__0_0.distcp", payloads.archived({"lr": 0.1}))
    assert pickles.check(tmp_path) == []
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    assert "that part is no archive of torch.save" in pickles.check(tmp_path)[0]
    (tmp_path / "__0_0.distcp").unlink()
    assert ".metadata speaks of __0_0.distcp, which cannot be read" in pickles.check(tmp_path)[0]


def test_metadata_cannot_lead_elsewhere(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    content = payloads.archived([payloads.Touch(tmp_path / "touched")])
    payloads.sharded(tmp_path / "checkpoint-2" / ".metadata", "../__0_0.distcp", content)
    message = pickles.check(tmp_path / "checkpoint-2")[0]
    assert "speaks of '../__0_0.distcp', which is no shard beside it" in message


def test_metadata_of_another_shape_is_refused(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"storage_data": {}}))
    assert "is no metadata of a sharded checkpoint" in pickles.check(tmp_path)[0]


@pytest.mark.parametrize("size", [0, 3, 200])
def test_a_file_cut_short_is_refused(size, tmp_path):
    harmless(tmp_path / "checkpoint-2")
    path = tmp_path / "checkpoint-2" / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:size])
    problem = pickles.check(path.parent)[0]
    assert problem.startswith("optimizer.pt is ")


def test_an_archive_of_code_is_refused(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "model.pt")
    assert "archive of code (TorchScript)" in pickles.check(tmp_path)[0]


@pytest.mark.parametrize(
    "name",
    ["builtins.getattr", "builtins.eval", "torch.load", "os.system", "collections.Counter.update"],
)
def test_only_names_on_the_list_are_known(name, tmp_path):
    """By the opcode that newer protocols use, whose names may have dots."""
    module, _, attribute = name.partition(".")
    words = [bytes([0x8C, len(word)]) + word.encode() for word in (module, attribute)]
    data = b"\x80\x04" + b"".join(words) + b"\x93."
    with zipfile.ZipFile(tmp_path / "optimizer.pt", "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3")
    assert f"names {name}, which no checkpoint needs" in pickles.check(tmp_path)[0]


def test_the_list_holds_nothing_that_acts():
    """The functions on it, by hand: what is added has to be looked at."""
    functions = {
        f"{module}.{name}"
        for module, name in pickles.ALLOWED
        if name.startswith("_") or name in ("encode", "scalar")
    }
    assert functions == {
        "_codecs.encode",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "torch._tensor._rebuild_from_type_v2",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        "torch.serialization._get_layout",
    }
    assert not {name for _, name in pickles.ALLOWED} & {"getattr", "eval", "exec", "load"}


def test_nothing_is_imported_for_a_name(tmp_path, monkeypatch):
    """A package that is on the path because the job started there is not imported for its name."""
    (tmp_path / "intruder.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / ".metadata").write_bytes(b"cintruder\nThing\n.")
    assert "names intruder.Thing" in pickles.check(tmp_path / "checkpoint-2")[0]
    assert not (tmp_path / "touched").exists()
