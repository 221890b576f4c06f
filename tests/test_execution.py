"""Real programs that misbehave: each ends within its limit, and leaves nothing running and nothing behind."""
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nanochat.tasks import execution
from nanochat.tasks.execution import MAX_FILE_BYTES, MAX_PROCESSES, run_python

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="limits of memory and /proc are Linux's")
MARK = f"nanochat-test-{os.getpid()}"  # on the command line of what a program starts


def running() -> bool:
    found = subprocess.run(["pgrep", "-f", "--", MARK], stdout=subprocess.PIPE)
    return found.returncode == 0


def wait_for(condition) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(params=["walls", "limits"])
def run(request, tmp_path, monkeypatch):
    """run_python with bubblewrap (skipped where it does not work), and as if it were not installed."""
    if request.param == "limits":
        monkeypatch.setattr(execution, "bubblewrap", tuple)
    elif not execution.bubblewrap():
        pytest.skip("bubblewrap is not installed, or may make no namespaces here")
    folders = tmp_path / "temporary"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))

    def run(code: str, timeout: float = 100) -> str | None:
        began = time.monotonic()
        printed = run_python(code.replace("MARK", MARK), timeout)
        assert time.monotonic() - began < timeout + 20, "it did not end within its limit"
        assert not list(folders.iterdir()), "its folder is left"
        return printed

    run.walls = request.param == "walls"
    return run


@pytest.mark.parametrize("code, stdout", [
    ("print('é😀', end='')", "é😀"), ("print('out'); exit()", "out\n"),
    ("open('x', 'w').write('kept'); print(open('x').read())", "kept\n"),
    ("import subprocess; print(subprocess.check_output(['echo', 'hi']).decode(), end='')", "hi\n"),
    ("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('x', 'w'); os.chmod('.', 0)", ""),
    ("import os; print(dict(os.environ).keys() - {'LC_CTYPE', 'PWD'})", "set()\n"),
])
def test_right_programs(run, code, stdout):
    assert run(code) == stdout


@pytest.mark.parametrize("code, expected", [
    ("assert False", "AssertionError"), ("input()", "EOFError"), ("import torch", "ModuleNotFoundError"),
    (f"f = open('x', 'wb')\nfor _ in range(2): f.write(bytes({MAX_FILE_BYTES}))", "OSError"),
    pytest.param("x = bytearray(2**30)", "MemoryError", marks=linux_only),
])
def test_limits(run, code, expected):
    assert run(code) is None
    assert run(f"try:\n exec({code!r})\nexcept {expected}:\n print('as expected')") == "as expected\n"


@pytest.mark.parametrize("code", ["while True: pass", "import os; os.kill(os.getpid(), 9)",
                                  "import sys\nwhile True: sys.stdout.write('x' * 2**20)"])
def test_programs_that_never_end_well(run, code):
    assert run(code, timeout=3) is None


@linux_only
@pytest.mark.parametrize("end", ["", "\nwhile True: pass"], ids=["ends", "hangs"])
def test_children_end_with_the_program(run, end):
    """Without bubblewrap those that leave its process group go on, as the module says: none leaves it here."""
    command = "[sys.executable, '-I', '-S', '-c', 'import time; time.sleep(1000)', 'MARK']"
    code = f"import subprocess, sys, time\nsubprocess.Popen({command}, start_new_session={run.walls})\n"
    assert (run(code + "time.sleep(0.2); print('it has begun')" + end, 7) is None) == bool(end)
    wait_for(lambda: not running())  # the kernel ends what is in the namespace, soon after


@linux_only
@pytest.mark.parametrize("run", ["walls"], indirect=True)
def test_walls(run, tmp_path):
    """No network, no writing outside, no process in sight; a plain Python does each of it."""
    (tmp_path / "file").write_text("as it was")
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "1000"]) as other:
        attacks = [f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)",
                   f"open({str(tmp_path / 'file')!r}, 'w').write('spoilt')",
                   f"open('/proc/{other.pid}/cmdline').read()", f"import os; os.kill({other.pid}, 15)"]
        for code in attacks:
            assert run(code) is None, code
        assert (tmp_path / "file").read_text() == "as it was" and other.poll() is None
        for code in attacks:
            subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
        assert other.wait(100) == -15


@pytest.mark.skipif(os.geteuid() == 0, reason="the kernel does not limit root's processes")
@pytest.mark.parametrize("run", ["walls"], indirect=True)
def test_a_fork_bomb(run):
    counted = run("import os, time\nfor n in range(50):\n try:\n  if os.fork() == 0: time.sleep(100)\n"
                  " except OSError: break\nprint(n + 1)")
    assert 1 < int(counted) <= MAX_PROCESSES


def test_many_at_a_time_from_threads(run):
    codes = [f"print({i})\nif {i} % 3 == 0: raise ValueError({i})" for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run_python, codes)) == [f"{i}\n" if i % 3 else None for i in range(12)]


@pytest.mark.parametrize("run", ["walls"], indirect=True)
def test_the_program_ends_with_the_trainer(run, tmp_path):
    """Killed while a program runs, which the mark on the command line of the program's child shows."""
    mark = f"{MARK[:8]!r} {MARK[8:]!r}"  # only the child has it in one piece
    program = ("import subprocess, sys\n"
               f"subprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)', {mark}])")
    with subprocess.Popen([sys.executable, "-c", "import sys; from nanochat.tasks.execution import run_python; "
                           "run_python(sys.argv[1], 1000)", program], cwd=Path(__file__).parent.parent,
                          env=os.environ | {"TMPDIR": str(tmp_path)}) as trainer:
        wait_for(running)
        trainer.kill()
    wait_for(lambda: not running())
