"""What docs/memory.md says of predictions."""

import json

from benchmarks.figures.memory import BEGIN, END, with_figures

MIB = 2**20


def test_each_prediction_is_beside_what_was_taken(tmp_path):
    cpu = {
        "hardware": {"cores": 2},
        "cells": {"long_rows": {"full": {"predicted": 1000 * MIB, "measured": 1250 * MIB}}},
    }
    notes = {"notes": {"predicted_memory_bytes": 40 * MIB}, "peak_memory_bytes": 30 * MIB}
    gpu = {
        "hardware": {"gpu": "A GPU", "cores": 9},
        "title": "Work",
        "commit": "abc",
        "contestants": {
            "Stoker": notes,
            "Stoker, tuned": notes,
            "other": {"notes": {}, "peak_memory_bytes": 1},
        },
    }
    silent = gpu | {"contestants": {"Stoker": {"notes": {}, "peak_memory_bytes": MIB}}}
    files = {
        "memory/cpu": cpu,
        "gpu/gpt2_124m": gpu,
        "gpu/probes": {},
        "gpu/qwen3_600m_sft": silent,
    }
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    found = with_figures(f"before\n{BEGIN}\nold\n{END}\nafter", tmp_path)
    assert found.splitlines()[4:-2] == [
        "| 2 cores: long rows, full | 1,000 | 1,250 | 1.25 |",
        "| A GPU: Work, commit abc | 40 | 30 | 0.75 |",
        "| A GPU: Work; compiled, commit abc | 40 | 30 | 0.75 |",
    ]
