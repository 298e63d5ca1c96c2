"""The nodes of a job meet, and each difference between them that matters is refused."""

import contextlib
import random
import re
import socket
import threading

import pytest

from utils.config.errors import ConfigurationError, ExitCode, UnfitClusterError, UsedPortError
from utils.launch.rendezvous import check_nodes, listen, node_facts, node_problems
from utils.launch.slurm import Allocation

SAME = {"code": "abc", "python": "3.11.2", "torch": "2.13.0", "processes": 4}
FACTS = {"host": "n1", "gpus": 4, "devices": 4, "clock_ahead_s": 0.0, "same": SAME}
ALONE = Allocation(("n1",), 0, 2, 2, "127.0.0.1", 20000)


@pytest.fixture
def port():
    """Return the first of two adjacent free ports below the range of outgoing connections.

    A connection to a free port within that range may connect to itself and so occupy the port.
    """
    while True:
        number = random.randrange(20000, 32000)
        refused = contextlib.suppress(UnfitClusterError)
        with refused, listen("n1", number), listen("n1", number + 1):
            return number


def node(index: int, port: int) -> Allocation:
    return Allocation(("n1", "n2"), index, 2, None, "127.0.0.1", port)


def meet(port: int, between=lambda: None, **facts) -> list[object]:
    """Return what nodes n1 and n2 are told. n2 reports `facts`, and comes after `between`."""
    told = [None, None]

    def attend(index: int) -> None:
        allocation = node(index, port)
        own = node_facts(allocation, [], 0) | (facts if index else {})
        try:
            check_nodes(allocation, own)
            told[index] = "alike"
        except UnfitClusterError as refusal:
            told[index] = refusal.problems

    threads = [threading.Thread(target=attend, args=(index,)) for index in (0, 1)]
    threads[0].start()
    between()
    threads[1].start()
    for thread in threads:
        thread.join()
    return told


def test_nodes_hear_of_each_other_and_strangers_are_ignored(port):
    def strangers() -> None:
        for words in (b"", b"GET / HTTP/1.1\n", b'[1, 0, {"host": "n7"}]\n', b"[]\n", b"\xff\n"):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port + 1)) as stranger:
                        stranger.sendall(words)
                    break
                except ConnectionRefusedError:
                    continue

    assert meet(port, between=strangers) == ["alike", "alike"]
    first, second = meet(port, gpus=1)
    assert first == second == [first[0]]
    assert "n2: the job has 1 GPUs on this node" in first[0]
    listen("n1", port + 1).close()  # the port is free again


def test_a_node_without_an_answer_says_why_in_words(port, monkeypatch):
    monkeypatch.setenv("STOKER_MEET_TIMEOUT_S", "1")
    with pytest.raises(UnfitClusterError, match=r"n2 \(Connection refused\) got no answer from"):
        check_nodes(node(1, port), FACTS)
    listener = listen("n1", port + 1)

    def hang_up() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    closed = (
        r"n2 \((the connection was closed|Connection reset by peer|Broken pipe)\) got no answer"
    )
    try:
        with pytest.raises(UnfitClusterError, match=closed):
            check_nodes(node(1, port), FACTS)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_a_taken_port_and_a_time_that_is_none_are_refused(port, monkeypatch):
    for taken in (port, port + 1):  # rank 0's port, and the port of the rendezvous
        with (
            listen("n1", taken),
            pytest.raises(UsedPortError, match=f"n1: port {taken} is in") as no,
        ):
            check_nodes(node(0, port), FACTS)
        assert no.value.exit_code == ExitCode.LOST_RANK, "the job is queued again"
    monkeypatch.setenv("STOKER_MEET_TIMEOUT_S", "nan")
    with pytest.raises(ConfigurationError, match="give seconds from 1 to 3600"):
        check_nodes(node(1, port), FACTS)


def test_each_difference_names_both_nodes():
    for changes, problem in [
        ({"clock_ahead_s": -61.0}, r"the clock of n2 is -61 s off that of n1.*NTP"),
        ({"devices": 3}, r"n2: the job has 4 GPUs .*torch sees 3"),
        ({"same": SAME | {"processes": 2}}, r"processes: 4 on n1, but 2 on n2.*--gpus-per-node"),
        ({"same": SAME | {"code": "abd"}}, r"code: abc on n1, but abd on n2\. All nodes need one"),
    ]:
        [found] = node_problems([FACTS, FACTS | {"host": "n2"} | changes])
        assert re.search(problem, found)
    assert node_problems([FACTS, FACTS | {"host": "n2"}]) == []
    with pytest.raises(UnfitClusterError, match=r"n1: the job has 2 GPUs .* torch sees 1"):
        check_nodes(ALONE, node_facts(ALONE, [], devices=1))


def test_the_code_is_told_apart_by_names_and_content(tmp_path):
    def code(*names: str) -> str:
        return node_facts(ALONE, [tmp_path / name for name in names], 0)["same"]["code"]

    (tmp_path / "a.py").write_text("x = 1")
    before = code("a.py")
    assert before == code("a.py")
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 2")
    assert len({before, code("a.py"), code("b.py"), code("a.py", "b.py"), code("none")}) == 5
