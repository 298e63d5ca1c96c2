"""A plan that was kept is the plan that was made."""

import dataclasses

import numpy as np
import pytest

from utils.data import plan_cache
from utils.data.packing import Segments, plan_packing
from utils.data.plan_cache import keep_plan, kept_plan, plan_path, read_plan

FACTS = {"fingerprint": "f", "sequence_length": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plan_cache, "FEWEST_DOCUMENTS", 10)
    return tmp_path / "stoker" / "plans"


def made(seed=0, packing="best_fit"):
    lengths = np.random.default_rng(seed).integers(1, 200, size=500)
    return plan_packing(lengths, 64, packing)


def never():
    raise AssertionError("packed again")


def assert_same(plan, other):
    for name in Segments._fields:
        left, right = getattr(plan.segments, name), getattr(other.segments, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    np.testing.assert_array_equal(plan.row_offsets, other.row_offsets)
    plain = [field.name for field in dataclasses.fields(plan)]
    plain = [name for name in plain if name not in ("segments", "row_offsets")]
    assert len(plain) == 7
    for name in plain:
        assert getattr(plan, name) == getattr(other, name), name


@pytest.mark.parametrize("packing", ["best_fit", "concat", "none"])
def test_the_second_start_reads_what_the_first_one_made(packing):
    plan = kept_plan(FACTS, 500, lambda: made(packing=packing))
    assert plan.split
    assert plan.without_targets
    assert_same(kept_plan(FACTS, 500, never), plan)
    assert_same(plan, made(packing=packing))


def test_other_facts_are_another_plan():
    kept_plan(FACTS, 500, made)
    other = kept_plan(FACTS | {"sequence_length": 32}, 500, lambda: made(seed=1))
    assert_same(other, made(seed=1))


def test_other_code_is_another_plan(monkeypatch, tmp_path):
    path = plan_path(FACTS)
    changed = tmp_path / "row_filling.py"
    changed.write_text("# changed")
    monkeypatch.setattr(plan_cache.row_filling, "__file__", str(changed))
    assert plan_path(FACTS) != path


def test_few_documents_are_packed_each_time(cache):
    kept_plan(FACTS, 9, made)
    assert not cache.exists()


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_plan_is_made_anew(damage, caplog):
    kept_plan(FACTS, 500, made)
    path = plan_path(FACTS)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "flipped" else content[:-100])
    assert_same(kept_plan(FACTS, 500, made), made())
    assert "cannot be used" in caplog.text
    assert_same(kept_plan(FACTS, 500, never), made())


def test_the_oldest_make_room(monkeypatch):
    paths = [plan_path(FACTS | {"number": number}) for number in range(3)]
    plan = made()
    keep_plan(paths[0], plan)
    monkeypatch.setattr(plan_cache, "LIMIT_BYTES", int(2.5 * paths[0].stat().st_size))
    for path in paths[1:]:
        keep_plan(path, plan)
    assert [path.exists() for path in paths] == [False, True, True]
    assert not list(paths[0].parent.glob(".*"))


def test_what_is_too_large_or_cannot_be_written_is_said(cache, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(plan_cache, "LIMIT_BYTES", 100)
    assert_same(kept_plan(FACTS, 500, made), made())
    assert "each start packs again" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent.parent / "file" / "below"))
    (cache.parent.parent / "file").touch()
    caplog.clear()
    keep_plan(plan_path(FACTS), made())
    assert "not kept" in caplog.text
    assert read_plan(plan_path(FACTS)) is None
