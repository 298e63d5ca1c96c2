"""A run that is out of memory in any phase leaves a page, exit code 79 and a verdict."""

import json
import re

import pytest
import tiny
from launching import run_processes

from utils.launch.verdict import likeliest_cause, read_notes

pytestmark = pytest.mark.slow

STARVED = "tests/integration/starved_run.py"
SECRET = "LlamaForCausalLM"  # a word that the page would contain; the test makes it a secret
SIZE = r" +[\d.]+ [KMG]iB  "


@pytest.fixture
def starved(pretraining, workspace, tmp_path):
    """Return a function that lets a run out of memory; it returns run, output, verdict and page."""

    def start(moment: str, ranks: int = 1, **changes: object):
        run, notes = tmp_path / "run", tmp_path / "notes"
        notes.mkdir()
        evaluated = {"eval_data": f"held={workspace / 'heldout'}", "eval_steps": 3}
        argv = pretraining(run, **evaluated, per_device_eval_batch_size=8, **changes)
        env = {"STOKER_TEST_STARVE": moment, "STOKER_NOTES_DIR": str(notes), "A_TOKEN": SECRET}
        done = run_processes("cpu", STARVED, argv, env, processes=ranks)
        (page,) = run.glob("out-of-memory-rank*.txt")
        return run, done, likeliest_cause(read_notes(notes)), page

    return start


def test_in_training(starved):
    run, done, verdict, page = starved("train:0:3", activation_checkpointing="auto")
    text = page.read_text()
    assert done.codes == (79,), done.stdout[-3000:]
    assert "out of memory:\n" in done.stdout
    assert "Traceback" not in done.stdout
    what = r"out of memory \(host\), train, step 3: cannot allocate 4294967296 bytes in .* run_out"
    first = r"--activation_checkpointing full: [\d.]+ KiB \(predicted; now [\d.]+ MiB\)"
    shown = rf"  - \S+: {what}\n    what would help most: {first}\n    what took it: {page}\n"
    assert re.search(shown, done.stdout), done.stdout[-2000:]
    assert re.match(rf"rank 0 on \S+ failed: \S+ {what}$", verdict.text)
    assert verdict.exit_code == 79
    assert re.match(rf"\S+: {what}\n\n\*\*\* on 1 rank\(s\), 2 sequences x 64", text)
    assert re.search(r" tokens, \d+ of them real\n", text)
    for line in ("weights", "optimizer states", "other tensors", "this process, resident"):
        assert re.search(rf"^{SIZE}{line}$", text, re.MULTILINE), text[:3000]
    table = text.partition("the largest tensors\n")[2].splitlines()[:10]
    assert all(re.match(rf"{SIZE}float32 \(\d+, .*\)  \S", line) for line in table), table
    for origin in ("model.embed_tokens.weight", "result of "):
        assert any(origin in line for line in table), table
    assert re.search(rf"what would help most\n  {first}\n  --per_device_train_batch_size 1: ", text)
    assert text.rstrip().endswith("Error code 12 (Cannot allocate memory)")
    assert SECRET not in text
    event = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert event.pop("time") > 0
    assert event.pop("host") in verdict.text
    assert event == {"event": "out_of_memory", "step": 3, "rank": 0, "phase": "train",
                     "page": page.name}  # fmt: skip


def test_in_the_evaluation_of_one_of_two_ranks(starved):
    """The other rank loses its peer. The journal has the memory of both ranks in earlier phases."""
    run, done, verdict, page = starved("eval:1:6", ranks=2, async_save="true")
    text = page.read_text()
    assert done.codes[1] == 79, done.stdout[-3000:]
    assert done.codes[0] not in (0, 79)
    told = r"\S+ rank 1  out of memory: \S+ out of memory \(host\), eval, step 6: .*\nwhat would "
    told += rf"help most: --per_device_eval_batch_size 4: about .*\nwhat took it: {page}\n"
    assert re.search(told, done.stdout), done.stdout[-3000:]
    ended = r"rank 1 on \S+ failed: \S+ out of memory \(host\), eval, step 6"
    assert re.match(ended, verdict.text)
    assert verdict.exit_code == 79
    assert page.name == "out-of-memory-rank1.txt"
    assert ", 8 sequences x 64 tokens" in text
    assert re.search(r"\n  --per_device_eval_batch_size 4: about [\d.]+ KiB less\n", text)
    assert "\n  --async_save false: " in text
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seen = {"train": 0, "eval": 0, "save": 0}
    for line in lines:
        if line["event"] in seen:
            seen[line["event"]] += 1
            assert [each["rank"] for each in line["memory_by_rank"]] == [0, 1]
            assert all(each["host_rss_gib"] > 0.1 for each in line["memory_by_rank"])
    assert seen == {"train": 6, "eval": 1, "save": 1}


def test_out_of_memory_in_a_save_keeps_the_previous_checkpoint(starved):
    run, done, verdict, page = starved("save:0:6", dataloader_num_workers=2)
    text = page.read_text()
    assert done.codes == (79,), done.stdout[-3000:]
    assert "out of memory (host), save, step 6: cannot allocate more in" in verdict.text
    assert "\n  --dataloader_num_workers 1: " in text
    assert re.search(rf"{SIZE}its 2 workers\n", text)
    assert text.rstrip().endswith("MemoryError")
    assert (run / "checkpoint-3" / "manifest.json").is_file()
    assert not (run / "checkpoint-6" / "manifest.json").exists()
    assert tiny.train_lines(run)[-1]["step"] == 6
