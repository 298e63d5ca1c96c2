"""The named callbacks of a run: each one acts on events, is saved, and adds its figures."""

import typing
from unittest import mock

from transformers import TrainerCallback

from utils.training.callbacks import Callbacks

# The class of each field.
KINDS = {
    name: (typing.get_args(hint) or (hint,))[0]
    for name, hint in typing.get_type_hints(Callbacks).items()
}


def make_callbacks(**given: object) -> Callbacks:
    made = {name: mock.create_autospec(kind, instance=True) for name, kind in KINDS.items()}
    made["own"].made = {}  # the callbacks of --callbacks
    return Callbacks(**made | given)


def names(callbacks: Callbacks, found: list[object]) -> set[str]:
    return {name for name in KINDS if any(getattr(callbacks, name) is one for one in found)}


def test_no_callback_is_forgotten():
    callbacks = make_callbacks()
    acting = {name for name, kind in KINDS.items() if issubclass(kind, TrainerCallback)}
    assert names(callbacks, callbacks.in_order()) == acting
    stateful = {name for name, kind in KINDS.items() if hasattr(kind, "restore")}
    assert names(callbacks, callbacks.stateful()) == stateful
    measuring = {name for name, kind in KINDS.items() if hasattr(kind, "metrics")}
    for name in measuring:
        getattr(callbacks, name).metrics.return_value = {name: 1.0}
    assert callbacks.metrics().keys() == measuring
    optional = dict.fromkeys(
        ("inherited", "early_stopping", "average", "profiler", "balance", "source_losses")
    )
    callbacks = make_callbacks(**optional)  # the settings leave them out
    assert None not in [*callbacks.in_order(), *callbacks.stateful()]
