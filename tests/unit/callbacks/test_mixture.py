"""The figures of a mixture's sources: by name, over all starts, silent where there is one."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import TrainerControl, TrainerState

from utils.callbacks.metrics import MixtureShares
from utils.data.loader import TokenCounts, source_names
from utils.data.order import SampleOrder

ARGS = SimpleNamespace(device="cpu")


class Loader:
    """Four samples a step of two sources with 100 and 300 tokens a row."""

    def __init__(self, names: list[str], tokens: list[int]):
        self.per_row = np.array(tokens)
        order = SampleOrder([10] * len(names), seed=0, weights=[1] * len(names))
        self.batch_sampler = SimpleNamespace(order=order, global_batch_size=4)
        self.dataset = SimpleNamespace(
            datasets=[SimpleNamespace(path=Path("/data", name)) for name in names],
            plans=[SimpleNamespace(tokens=10 * number, sequences=10) for number in tokens],
        )
        paths = [dataset.path for dataset in self.dataset.datasets]
        self.tokens_seen = TokenCounts(self.tokens_by_source, source_names(paths))

    def tokens_by_source(self, step: int) -> np.ndarray:
        sources, _ = self.batch_sampler.order.interleaving.locate(np.arange(4 * step, 4 * step + 4))
        return np.bincount(sources, minlength=len(self.per_row)) * self.per_row


def begun(loader: Loader, step: int = 0) -> MixtureShares:
    shares = MixtureShares()
    state = TrainerState(global_step=step)
    shares.on_train_begin(ARGS, state, TrainerControl(), train_dataloader=loader)
    return shares


def after(shares: MixtureShares, step: int) -> dict[str, float]:
    shares.on_step_end(ARGS, TrainerState(global_step=step), TrainerControl())
    return shares.metrics()


def test_a_resumed_run_logs_what_the_uninterrupted_one_does():
    whole = begun(Loader(["web", "code"], [100, 300]))
    after(whole, 5)
    carried = whole.loader.tokens_seen.state()
    last = after(whole, 8)
    loader = Loader(["web", "code"], [100, 300])
    loader.tokens_seen.resume(5, carried)
    assert after(begun(loader, step=5), 8) == last
    assert set(last) == {
        f"{figure}/{name}"
        for figure in ("tokens_seen", "tokens_share", "epochs")
        for name in ("web", "code")
    }
    assert last["tokens_share/web"] + last["tokens_share/code"] == pytest.approx(1)
    assert last["tokens_seen/web"] == 100 * 10 * last["epochs/web"]
    assert last["epochs/web"] + last["epochs/code"] == 3.2


def test_one_dataset_has_no_shares(caplog):
    caplog.set_level("INFO")
    assert after(begun(Loader(["web"], [100])), 3) == {}
    assert "mixture" not in caplog.text


def test_what_was_asked_for_is_said_in_tokens_too(caplog):
    caplog.set_level("INFO")
    begun(Loader(["web/train", "code/train"], [100, 300]))
    assert (
        "mixture: web 50.0% of the sequences (of the tokens 25.0%), code 50.0% of the sequences "
        "(of the tokens 75.0%)" in caplog.text
    )
