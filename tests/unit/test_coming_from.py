"""docs/coming-from.md: our settings in its tables exist, and the importer agrees with them."""

import re

import pytest
from test_repository import ROOT

from utils.config.arguments import DataArguments, FineTuneConfig, ModelArguments, RunArguments
from utils.config.declarations import declared_settings
from utils.config.foreign_words import other_names
from utils.config.own_code import OwnCode
from utils.config.preparation import (
    ENTRY_KEYS,
    PreparationArguments,
)
from utils.importing.toolkits import LEFT, TOOLKITS

TEXT = (ROOT / "docs" / "coming-from.md").read_text()
CLASSES = (RunArguments, DataArguments, ModelArguments, OwnCode, FineTuneConfig)
SETTINGS = {*declared_settings(CLASSES), *declared_settings((PreparationArguments,))}
KNOWN = {"config", "extends", *ENTRY_KEYS, *SETTINGS}


def names(cell: str) -> set[str]:
    """Return the keys in a cell: `packing` for `packing: best_fit`, the flags of a command."""
    spans = re.findall(r"`([^`]+)`", cell)
    keys = {match[0] for span in spans if (match := re.match(r"[a-z]\w*(?=$|:)", span))}
    return keys | {flag for span in spans for flag in re.findall(r"--(\w+)", span)}


def test_what_tables_and_refusals_call_ours_is_a_setting():
    rows = [line.split("|")[1:3] for line in TEXT.splitlines() if line.startswith("| ")]
    ours = set.union(*(names(here) for _, here in rows))
    assert len(rows) > 50
    assert {"global_batch_size", "sources", "optim_states", "config"} <= ours <= KNOWN
    for theirs, here in rows:
        for name in names(theirs) - KNOWN:  # the error for this name agrees with the table
            advice = other_names().get(name, "")
            assert not advice.isidentifier() or advice in names(here), f"{name}: {advice}, {here}"
    assert {advice for advice in other_names().values() if advice.isidentifier()} <= KNOWN


@pytest.mark.parametrize(
    ("title", "at_least"), [("TRL", 3), ("axolotl", 12), ("LLaMA-Factory", 10)]
)
def test_the_importer_agrees_with_the_tables(title, at_least):
    toolkit = TOOLKITS[title.lower().replace("-", "")]
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    compared = 0
    for theirs, here in rows:
        for name in names(theirs):
            ours = toolkit.names.get(name) or other_names().get(name, "")
            if ours in KNOWN and name not in LEFT:
                assert ours in names(here), f"{name}: {ours}, {here}"
                compared += 1
    assert compared >= at_least
