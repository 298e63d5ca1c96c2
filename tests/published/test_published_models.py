"""Small versions of published models train in every way, with transformers' own losses."""

import json
import math

import pytest
import record
import trials
from facts import ONE_A_ROW, REFUSED
from published_models import MODELS

from benchmarks.figures import models as figures

RECORDED = {
    model["name"]: model for model in json.loads(record.RESULTS.read_text("utf-8"))["models"]
}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    trials.prepare(root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(model, marks=[] if number % 6 == 0 else pytest.mark.exhaustive)
        for number, model in enumerate(MODELS)
    ],
    ids=[model.name.rpartition("/")[2] for model in MODELS],
)
def test_a_published_model_trains(model, data, tmp_path, tmp_path_factory):
    with trials.quiet_process(tmp_path_factory.getbasetemp() / "cache"):
        seen = trials.try_model(model, data, tmp_path)
    if model.packs == REFUSED:
        assert model.why in seen["refused"]
    else:
        for losses in (seen["pretraining"], seen["sft"], seen["lora"]):
            assert all(0 < loss < 2 * math.log(trials.VOCABULARY) for loss in losses)
        assert seen["resumed"]
        assert seen["plain_loss_difference"] < 1e-5
        assert (seen["generated"], seen["lora_generated"]) == (4, 4)
    expected = record.result_of(model, seen)
    ways = ("pretraining", "sft", "lora", "packed", "why")
    assert {way: RECORDED[model.name][way] for way in ways} == {w: expected[w] for w in ways}


def test_the_document_says_what_the_results_of_these_models_say():
    document = figures.DOCUMENT.read_text("utf-8")
    assert figures.with_figures(document) == document, "run make figures"
    assert list(RECORDED) == [model.name for model in MODELS]
    for model in MODELS:
        assert bool(model.why) == (model.packs in (ONE_A_ROW, REFUSED))
        assert set(model.config) <= set(model.small_config()), "it keeps its published form"
