import copy
import re

import pytest

from utils.config.errors import UnfitClusterError
from utils.jobs.allocation import Allocation
from utils.jobs.node_check import check_nodes, node_facts, node_problems

FACTS = {
    "host": "n1", "processes": 4, "gpus": 4, "devices": 4, "visible": None, "code": "abc",
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
}  # fmt: skip


def other(**changes):
    return copy.deepcopy(FACTS) | {"host": "n2"} | changes


def test_nodes_that_are_alike_have_no_problem():
    assert node_problems([FACTS, other()], [0.0, 59.0]) == []
    cpus = {"gpus": None, "devices": 0}
    assert node_problems([FACTS | cpus, other(**cpus)], [0.0, 0.0]) == []


@pytest.mark.parametrize(
    ("changes", "clocks", "problem"),
    [
        ({"devices": 3, "visible": "0,1,2"}, (0, 0), r"n2: .* 4 GPUs .*sees 3 \(CUDA.*=0,1,2\)"),
        ({"processes": 2, "gpus": 2}, (0, 0), r"n1 has 4 processes .*n2 has 2"),
        ({"versions": {"python": "3.11.2"}}, (0, 0), r"torch is 2\.13\.0 on n1, but None on n2"),
        ({"code": "abd"}, (0, 0), r"differs between n1 \(abc\) and n2 \(abd\)"),
        ({}, (0, 61), r"clock of n2 is 61 s ahead of that of n1"),
        ({}, (75, 0), r"clock of n1 is 75 s ahead of that of n2"),
    ],
)
def test_each_difference_names_both_nodes(changes, clocks, problem):
    (found,) = node_problems([FACTS, other(**changes)], clocks)
    assert re.search(problem, found)


def test_all_problems_of_all_nodes_are_told_at_once():
    everyone = [FACTS | {"devices": 0}, other(devices=0, code="x")]
    assert len(node_problems(everyone, [0, 100])) == 4


def test_one_node_looks_at_its_devices_alone(caplog):
    allocation = Allocation(("n1",), 0, 2, 2, "127.0.0.1", 20000)
    with pytest.raises(UnfitClusterError, match=r"n1: the job has 2 GPUs .* torch sees 1"):
        check_nodes(allocation, node_facts(allocation, [], devices=1), None)
    assert check_nodes(allocation, node_facts(allocation, [], 2), None) == (
        "node check: n1, 2 GPU(s) each"
    )
    assert not caplog.records
    check_nodes(allocation, node_facts(allocation, [], 8), None)
    assert "n1: torch sees 8 GPUs, and the job uses 2" in caplog.text


def test_the_code_is_told_apart_by_names_and_content(tmp_path):
    allocation = Allocation(("n1",), 0, 2, 2, "127.0.0.1", 20000)
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1")

    def code(*files):
        return node_facts(allocation, files, 0)["code"]

    before = code(one)
    assert before == code(one)
    one.write_text("x = 2")
    assert before != code(one)
    two.write_text("x = 2")
    assert len({code(one), code(two), code(one, two), code(tmp_path / "none")}) == 4
