"""The board in a process: Ctrl-C ends it."""

import http.client
import subprocess
import sys
from pathlib import Path
from signal import SIGINT
from urllib.parse import urlsplit

from unit.board import test_board as unit_tests
from unit.board.test_board import TIMEOUT_S

root = unit_tests.root


def test_ctrl_c_ends_it_with_exit_code_0(root: Path) -> None:
    code = "import sys; from paceline.board.board import board_verb; sys.exit(board_verb(sys.argv[1], '127.0.0.1', 0))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    url = line.removeprefix("board at ").partition(" ")[0]
    assert line == f"board at {url} (Ctrl-C to stop)\n"
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port, timeout=TIMEOUT_S)
    connection.request("GET", "/events")
    assert connection.getresponse().readline().startswith(b"event: runs")
    process.send_signal(SIGINT)
    out, err = process.communicate(timeout=TIMEOUT_S)
    connection.close()
    assert (process.returncode, out, err) == (0, "", "")
