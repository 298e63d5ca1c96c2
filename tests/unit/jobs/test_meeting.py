import socket
import threading

import pytest

from utils.cluster.slurm_tasks import listen
from utils.config.errors import ConfigurationError, UnfitClusterError
from utils.jobs.allocation import Allocation
from utils.jobs.meeting import Meeting, with_free_port


@pytest.fixture
def port():
    """The first of two neighbouring ports that are free."""
    while True:
        with listen(0) as first:
            number = first.getsockname()[1]
            try:
                listen(number + 1).close()
            except (OSError, OverflowError):
                continue
        return number


def node(index: int, port: int, address: str = "127.0.0.1") -> Allocation:
    return Allocation(("n1", "n2"), index, 2, None, address, port)


def test_nodes_hear_of_each_other_in_their_order(port):
    heard = {}

    def attend(index: int) -> None:
        with Meeting(node(index, port)) as meeting:
            heard[index] = [meeting.exchange("name", f"node {index}"), meeting.exchange("i", index)]

    threads = [threading.Thread(target=attend, args=(index,)) for index in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert heard[0] == heard[1] == [["node 0", "node 1"], [0, 1]]
    listen(port + 1).close()  # free again


def test_a_node_that_does_not_come_is_named(port, monkeypatch):
    monkeypatch.setenv("STOKER_MEET_TIMEOUT_S", "1")
    with pytest.raises(UnfitClusterError, match=rf"n2 did not come to 127.0.0.1:{port + 1} within"):
        Meeting(node(0, port)).exchange("facts", 1)


def test_a_first_node_that_does_not_answer_is_named(port, monkeypatch):
    monkeypatch.setenv("STOKER_MEET_TIMEOUT_S", "1")
    with pytest.raises(UnfitClusterError, match=r"n2: .*address of n1 .*did not answer within 1 s"):
        Meeting(node(1, port))


def test_a_wrong_address_is_seen_at_once_by_the_first_node(port):
    with pytest.raises(UnfitClusterError, match=r"n1: no\.such\.host:.* is no name or address"):
        Meeting(node(0, port, "no.such.host"))
    with pytest.raises(UnfitClusterError, match=r"n1: 192\.0\.2\.1:.* does not lead back to it"):
        Meeting(node(0, port, "192.0.2.1"))  # reserved for documentation: nobody's


def test_a_taken_port_is_refused_or_replaced_by_the_only_node(port, monkeypatch):
    alone = Allocation(("n1",), 0, 1, None, "127.0.0.1", port)
    assert with_free_port(alone) == alone
    with listen(port):
        assert with_free_port(alone).port != port
        assert with_free_port(node(1, port)).port == port  # the first node's affair
        with pytest.raises(UnfitClusterError, match=f"n1: port {port} is in use .*: set STOKER_M"):
            with_free_port(node(0, port))
        monkeypatch.setenv("STOKER_MAIN_PORT", str(port))
        with pytest.raises(UnfitClusterError, match=f"n1: port {port} is in use .*: unset STOKER"):
            with_free_port(alone)
    with listen(port + 1), pytest.raises(UnfitClusterError, match=f"n1: port {port + 1} is in use"):
        Meeting(node(0, port))


@pytest.mark.parametrize("value", ["soon", "0", "inf", "nan", "1e9"])
def test_the_limit_has_to_be_seconds(port, monkeypatch, value):
    monkeypatch.setenv("STOKER_MEET_TIMEOUT_S", value)
    with pytest.raises(ConfigurationError, match="give seconds from 1 to 3600"):
        Meeting(node(1, port))


def test_what_is_said_is_data(port):
    """A listener that says something else is no node, and nothing of it is run."""
    with socket.create_server(("127.0.0.1", port + 1)) as stranger:
        stranger.settimeout(5)
        thread = threading.Thread(target=lambda: [stranger.accept()[0].close() for _ in range(1)])
        thread.start()
        meeting = Meeting(node(1, port))
        thread.join()
    meeting.timeout_s = 1.0
    with pytest.raises(UnfitClusterError, match=r"n2 lost 127\.0\.0\.1"):
        meeting.exchange("facts", 1)
