import pytest

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments, check_preparation
from utils.config.raw_data import datasets_of_raw


def arguments(**settings) -> PreparationArguments:
    given = {"sources": ["a.jsonl"], "output_dir": "out", "tokenizer_name_or_path": "t"}
    return PreparationArguments(**{**given, **settings})


CONTRADICTIONS = [
    ({"sources": []}, "sources is empty"),
    ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
    ({"sequence_length": 1}, "sequence_length is 1: it must be at least 2"),
    ({"template_date": "May"}, "template_date is 'May': give a day as YYYY-MM-DD"),
    ({"on_overlong": "drop"}, "give --sequence_length"),
    ({"add_tokens": [" "]}, "add_tokens has an empty token"),
    ({"shard": "1/2", "merge": 2}, "shard and merge are separate steps"),
    ({"shard": "2/2"}, "I from 0 to N-1"),
    ({"shard": "1"}, "give I/N"),
]


def test_contradictions_are_refused():
    for settings, message in CONTRADICTIONS:
        with pytest.raises(ConfigurationError, match=message):
            check_preparation(arguments(**settings))


def test_all_faults_are_shown_at_once_and_settings_that_fit_are_accepted():
    with pytest.raises(ConfigurationError) as caught:
        check_preparation(arguments(num_proc=0, sequence_length=0, shard="x"))
    assert len(caught.value.problems) == 3
    check_preparation(arguments(shard="3/4", sequence_length=128, on_overlong="drop"))


def test_a_weighted_raw_folder_is_not_named_like_a_split_of_its_files(tmp_path):
    paths = []
    for name in ("first", "code", "valid"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").touch()
        paths.append(f"{tmp_path}/{name}")
    names = datasets_of_raw(dict.fromkeys(paths, 1.0), ())
    assert list(names.values()) == ["train", "code", "source_3"]
