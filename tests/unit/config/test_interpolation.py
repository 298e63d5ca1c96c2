"""`${...}` refers to settings and to a few environment variables, never to secrets."""

import pytest

from utils.config.command_line import has_interpolation, resolve_interpolations


def resolve(**values):
    return resolve_interpolations(values, values)


def test_references_keep_the_type_alone_and_become_text_within_text():
    values, faults = resolve(seed=3, rate=1e-4, same="${rate}", name="runs/${seed}-${rate}")
    assert faults == {}
    assert values["same"] == 1e-4
    assert values["name"] == "runs/3-0.0001"


def test_references_reach_into_lists_and_mappings_and_through_each_other():
    values, faults = resolve(a="x", b="${a}y", c=["${b}", {"k": "${c2.deep}"}], c2={"deep": 5})
    assert faults == {}
    assert values["c"] == ["xy", {"k": 5}]


def test_references_see_the_context_but_only_the_values_come_back():
    values, faults = resolve_interpolations({"a": "${seed}"}, {"a": "${seed}", "seed": 42})
    assert (values, faults) == ({"a": 42}, {})


def test_values_without_references_are_untouched():
    values = {"a": "$HOME {b} $", "b": [1, None], "c": {"d": True}}
    assert not has_interpolation(values)
    assert resolve_interpolations(values, values) == (values, {})


def test_an_unknown_setting_is_a_fault_of_that_value_alone():
    values, faults = resolve(a="${gone}", b="${c}", c=1)
    assert values["b"] == 1
    assert "gone" in faults["a"]
    assert list(faults) == ["a"]


def test_a_circle_is_a_fault():
    _, faults = resolve(a="${b}", b="${a}")
    assert set(faults) == {"a", "b"}


def test_allowed_variables_are_read_with_their_defaults(monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.delenv("WORK", raising=False)
    values, faults = resolve(
        a="${oc.env:SCRATCH}/${oc.env:SLURM_JOB_ID}", b="${oc.env:WORK,/tmp}/x"
    )
    assert faults == {}
    assert values == {"a": "/scratch/me/17", "b": "/tmp/x"}


def test_an_unset_variable_is_a_fault(monkeypatch):
    monkeypatch.delenv("WORK", raising=False)
    assert "WORK" in resolve(a="${oc.env:WORK}")[1]["a"]


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HF_TOKEN}",
        "${oc.env:WANDB_API_KEY,none}",
        "x${oc.env: HF_TOKEN}",
        "${oc.env:HOMEX}",
        "${oc.env:SLURM_JWT}",
    ],
)
def test_other_variables_are_refused_because_settings_are_logged(monkeypatch, text):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "HOMEX", "SLURM_JWT"):
        monkeypatch.setenv(name, "hunter2")
    values, faults = resolve(run_name=text)
    assert "may hold a secret" in faults["run_name"]
    assert "hunter2" not in str(faults) + str(values)


@pytest.mark.parametrize(
    "text",
    [
        "${oc.decode:x}",
        "${oc.${part}:HF_TOKEN}",
        "${oc.env:${part}}",
        "${oc.env:HOME,${oc.env:HF_TOKEN}}",
        "${.relative}",
        "${a[0]}",
        "${unclosed",
        "${}",
        "\\${escaped:x}",
    ],
)
def test_other_forms_are_refused(monkeypatch, text):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    values, faults = resolve(part="env", a=text)
    assert "only ${setting} and ${oc.env:VARIABLE} are understood" in faults["a"]
    assert "hunter2" not in str(faults) + str(values)


def test_a_malformed_value_does_not_spoil_the_others():
    values, faults = resolve(bad="${unclosed", good="${seed}", seed=3)
    assert list(faults) == ["bad"]
    assert values["good"] == 3
