"""What the benchmarks conclude from what they saw: the client of servers, and the rows of the table."""

import socket
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from cpu_peaks import Peaks
from cpu_peers import evaluate
from cpu_roofline import Row as KernelRow
from cpu_roofline import rows_table, step_parts, step_rows
from peers import http_load
from peers.jobs import Row
from two_checkouts import ROWS, interval_of_median, report

OURS, PEER, SLOWER = ("ours", "x"), ("peer", "x"), ("slower", "x")
GAP_S = 0.05


def chunk(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


def serve(pieces: list[bytes]) -> http_load.Address:
    """A server that answers one request with pieces, a little apart."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(GAP_S)

    threading.Thread(target=answer, daemon=True).start()
    return http_load.Address(listener.getsockname()[1], "model")


def event(text: str) -> str:
    return f'data: {{"choices": [{{"text": "{text}"}}]}}\n\n'


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
USAGE = 'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'


@pytest.mark.slow
def test_pieces_are_timed_when_they_are_whole():
    first, rest = chunk(event("naïve"))[:12], chunk(event("naïve"))[12:]
    pieces = [HEAD, first, rest, chunk(event("b") + event("c")), chunk(USAGE), b"0\r\n\r\n"]
    (answer,) = http_load.complete(serve(pieces), [[1]], 3, 1)
    assert answer.num_tokens == 3 and len(answer.piece_times_s) == 3
    one, two, three = answer.piece_times_s
    assert one - answer.start_s >= 2 * GAP_S * 0.9 and two - one >= GAP_S * 0.9 and three == two
    figures = http_load.figures([answer])
    assert figures["tokens_per_s"] == pytest.approx(3 / (three - answer.start_s))
    assert figures["ttft_p50_ms"] == pytest.approx((one - answer.start_s) * 1e3)
    assert figures["itl_p99_ms"] == pytest.approx((two - one) * 1e3)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"], "503"),
        ([HEAD, chunk(event("a")), chunk(USAGE), b"0\r\n\r\n"], "1 completions have 3 tokens instead of 4"),
        ([HEAD, chunk('data: {"error": "lost"}\n\n'), b"0\r\n\r\n"], "the server failed: lost"),
        ([HEAD, b"0\r\n\r\n"], "no text came"),
    ],
)
def test_other_answers_are_errors(pieces: list[bytes], message: str):
    with pytest.raises(RuntimeError, match=message):
        http_load.complete(serve(pieces), [[1]], 4, 1)


def test_the_best_peer_counts_and_a_ratio_above_one_is_better():
    series = {OURS: [4.0, 2.0, 3.0], PEER: [2.0], SLOWER: [1.0]}
    rate = evaluate(Row("r", "", "", OURS, (SLOWER, PEER), ratio_at_least=1.5), series)
    assert (rate["ratio"], rate["peer_name"], rate["met"]) == (1.5, "peer", True)
    seconds = evaluate(Row("s", "", "", OURS, (SLOWER, PEER), more_is_better=False, ratio_at_least=0.5), series)
    assert (seconds["ratio"], seconds["peer_name"], seconds["met"]) == (1 / 3, "slower", False)
    limit = evaluate(Row("l", "", "", OURS, more_is_better=False, ours_at_most=2.9), series)
    assert (limit["ours"], limit["peer"], limit["ratio"], limit["met"]) == (3.0, None, None, False)


def test_a_floor_is_the_larger_of_reading_and_multiplying():
    peaks = Peaks({"L2": 100e9, "memory": 10e9}, {"bfloat16": 1e12})
    rows = [KernelRow("g", f"a, {n} rows", 1e6, ops, "bfloat16", "memory", 400e-6) for n, ops in ((1, 1e6), (8, 2e8))]
    for row in rows:
        row.compare(peaks)
    assert [row.floor_s for row in rows] == pytest.approx([100e-6, 200e-6])
    assert [row.bound for row in rows] == ["memory", "bfloat16 products"]
    assert rows_table(rows).splitlines()[-1] == "| a | 100 / 400 (25%) | 200 / 400 (50%) |"
    assert peaks.level(500 << 10, 2) == "L2" and peaks.level(1 << 30, 2) == "memory"


def test_a_step_is_compared_with_all_of_its_kernels():
    parts = step_parts("Q4_1", 64)
    assert sum(parts.values()) == 30 * 8 + 3
    missing = [KernelRow(*name, 0, 0, "int8", "L2", 1.0) for name in list(parts)[:-1]]
    assert list(step_rows(missing)) == []


def test_the_interval_of_a_median_holds_it_with_the_confidence_that_so_many_values_allow():
    assert interval_of_median([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval_of_median([float(value) for value in range(15)]) == (
        3.0,
        11.0,
    )  # 0.965, as in tables of the sign test
    assert interval_of_median([float(value) for value in range(6)]) == (0.0, 5.0)


def test_a_ratio_above_1_is_better_after():
    faster, earlier = [(100.0, 110.0)] * 3, [(2.0, 1.0)] * 3
    assert "| 100 | 110 | 1.100 (1.100 to 1.100) |" in report("single_decode_bf16", ROWS["single_decode_bf16"], faster)
    assert "| 2 | 1 | 2.000 (2.000 to 2.000) |" in report("start", ROWS["start"], earlier)
