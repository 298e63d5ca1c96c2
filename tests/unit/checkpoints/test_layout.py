"""A checkpoint is loaded under the strategy that wrote it, on any number of ranks."""

import itertools

import pytest

from utils.checkpoints.manifest import Manifest, check_layout, write_manifest
from utils.config.errors import ConfigurationError

STRATEGIES = ["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
ALIKE = [("single", "ddp"), ("ddp", "single"), ("zero1", "zero2"), ("zero2", "zero1")]
SAME = [*zip(STRATEGIES, STRATEGIES, strict=True), *ALIKE]
OTHER = sorted(set(itertools.permutations(STRATEGIES, 2)) - set(SAME))


@pytest.fixture
def written(tmp_path):
    """Commit an empty checkpoint of a strategy."""

    def write(strategy: str):
        manifest = Manifest("run", 3, 24, 9, 2, strategy, 8, {}, {}, "now", {})
        write_manifest(tmp_path, manifest)
        return tmp_path

    return write


@pytest.mark.parametrize(("before", "now"), SAME)
def test_the_strategy_that_wrote_it_goes_on_and_those_that_write_alike(before, now, written):
    check_layout(written(before), now)


@pytest.mark.parametrize(("before", "now"), OTHER)
def test_another_one_is_refused_with_the_way(before, now, written):
    words = f"written under {before} and cannot be loaded under {now}: .*any number of ranks will"
    with pytest.raises(ConfigurationError, match=words):
        check_layout(written(before), now)
