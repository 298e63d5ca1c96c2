import preparation_samples as samples
import pytest

from utils.config.errors import ConfigurationError
from utils.config.preparation import PreparationArguments
from utils.data.prepare.plan import plan_preparation


def plan(*sources, **settings):
    given = {"output_dir": "out", "tokenizer_name_or_path": "t", **settings}
    return plan_preparation(PreparationArguments(sources=[str(s) for s in sources], **given))


@pytest.fixture
def text(tmp_path):
    return samples.text_source(tmp_path / "a.jsonl", 5)


def test_columns_decide_the_format_unless_it_is_given(tmp_path):
    source = samples.write_jsonl(tmp_path / "a.jsonl", [{"body": "a"}])
    assert plan(source, columns=["body=text"]).settings.document_format == "text"
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:1: no known format.*\(columns: body\)"):
        plan(source)
    both = samples.write_jsonl(tmp_path / "b.jsonl", [{"text": "a", **samples.chat("q", "a")}])
    with pytest.raises(ConfigurationError, match="could be text or messages: choose one with"):
        plan(both)
    assert plan(both, format="messages").settings.document_format == "messages"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("name=", "give NAME=PATH"),
        ("Big Name=x.jsonl", "use lower-case letters"),
        ("validation=x.jsonl", "none of train, tokenizer, validation"),
    ],
)
def test_evaluation_sources_that_cannot_be_used_are_refused(text, given, message):
    with pytest.raises(ConfigurationError, match=message):
        plan(text, eval_sources=[given], validation_fraction=0.1)


def test_all_paths_are_checked_at_once(text):
    with pytest.raises(ConfigurationError, match=r"a\.jsonl: is given for both train and other"):
        plan(text, eval_sources=[f"other={text}"])
    with pytest.raises(ConfigurationError) as caught:
        plan(text, "gone.jsonl", "none*.txt", eval_sources=["b=gone2.jsonl"], chat_template="c.jin")
    joined = "\n".join(caught.value.problems)
    for part in ("chat_template: c.jin", "gone.jsonl", "none*.txt", "gone2.jsonl"):
        assert part in joined
    assert len(caught.value.problems) == 4


def test_a_first_record_that_is_missing_or_broken_stops_at_once_unless_skipped(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ConfigurationError, match="train: empty source: no record in its files"):
        plan(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{oops\n{"text": "a"}\n')
    with pytest.raises(ConfigurationError, match=r"a\.jsonl:1: malformed JSON"):
        plan(tmp_path / "a.jsonl")
    assert plan(tmp_path / "a.jsonl", on_bad_row="skip").settings.document_format == "text"
