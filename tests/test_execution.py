"""Real programs that misbehave: each ends within its limit, leaves nothing running and nothing behind, and is named."""
import contextlib
import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import nanochat.tasks.execution
from nanochat.tasks.execution import Result, run_python
from nanochat.tasks.sandbox import LINUX, MAX_FILE_BYTES, MAX_PROCESSES

REPO = Path(__file__).parent.parent
linux_only = pytest.mark.skipif(not LINUX, reason="there are no such walls on this system")
marks = itertools.count(400 * 2**20 + os.getpid() % 10**5 * 1000)  # limits of memory, each another one


def running(mark: str) -> list[str]:
    """Command lines of the processes that have `mark` in theirs, but for zombies, which run no more."""
    if not LINUX:
        lines = subprocess.check_output(["ps", "-axww", "-o", "command="], text=True).splitlines()
        return [line for line in lines if mark in line]
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it may end while we look
            lines.append(path.read_text(errors="replace"))
    return [line for line in lines if mark in line]


def wait_for(condition) -> None:
    """On a busy machine it may take minutes."""
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """
    run_python that fails when anything is left. The mark of a run is its memory limit, which is on the command line of
    the supervisor and of what it forks; programs put it on the command lines of what they start, as MARK.
    """
    folders = tmp_path / "temporary"
    folders.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))

    def run(code: str, timeout: float = 100, mark: int | None = None, **limits) -> Result:
        mark = mark or next(marks)
        began = time.monotonic()
        result = run_python(code.replace("MARK", str(mark)), timeout, mark, **limits)
        assert time.monotonic() - began < timeout + 10, "it did not end within its limit"
        assert not running(str(mark)), "processes are left"
        assert not list(folders.iterdir()), "its folder is left"
        return result

    return run


@linux_only
def test_every_wall_that_this_machine_allows_is_there(run):
    """The tests below skip what is not guarded; here the system itself says what could be."""
    allowed = shutil.which("unshare") and not subprocess.run(
        "unshare --user --map-root-user --pid --fork --net --ipc --mount-proc true".split(), capture_output=True
    ).returncode
    assert run("").unprotected == () if allowed else {"network", "processes"} <= set(run("").unprotected)


def test_the_search_for_what_is_left_finds_something():
    """The oracle of all tests here can fail: a child of ours is found until it is gone."""
    mark = str(next(marks))
    with subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)", mark],
                          stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = running(mark)
        process.kill()
    assert len(found) == 1 and not running(mark)


@pytest.mark.parametrize("code,stdout,stderr", [
    ("print('é😀', end='')", "é😀", ""),
    ("import sys; print('out'); print('err', file=sys.stderr); exit()", "out\n", "err\n"),
    ("import sys; sys.stdout.buffer.write(b'\\xff')", "\ufffd", ""),
    ("open('x', 'w').write('kept'); print(open('x').read())", "kept\n", ""),
    ("import os; os.mkdir('a'); os.chmod('a', 0); os.symlink('/', 'b')", "", ""),
    ("import threading; threading.Timer(0.1, print, ['later']).start()", "later\n", ""),
    ("import subprocess; print(subprocess.check_output(['echo', 'hi']).decode())", "hi\n\n", ""),
    ("import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\nopen('x', 'w'); os.chmod('.', 0)", "", ""),
])
def test_right_programs(run, code, stdout, stderr):
    result = run(code)
    assert (result.ok, result.error, result.stdout, result.stderr) == (True, None, stdout, stderr)


@pytest.mark.parametrize("code,error", [
    ("print('so far')\nassert False, 'wrong sum'", "exit code 1: AssertionError: wrong sum"),
    ("input()", "exit code 1: EOFError: EOF when reading a line"),
    ("import torch", "exit code 1: ModuleNotFoundError: No module named 'torch'"),
    ("x = '\ud800'", "exit code 1: SyntaxError: (unicode error) 'utf-8' codec can't decode"),
    ("import os; os.kill(os.getpid(), 9)", "signal 9"),
    pytest.param("import ctypes, os; ctypes.CDLL(None).ptrace(0); os.kill(os.getpid(), 10)", "killed",
                 marks=linux_only),
])
def test_what_is_wrong_is_named(run, code, error):
    result = run(code)
    assert not result.ok and result.error.startswith(error)
    assert result.stdout == ("so far\n" if "so far" in code else "")


@pytest.mark.parametrize("code", ["while True: pass", "import time; print('begun', flush=True); time.sleep(1000)"])
def test_an_infinite_loop(run, code):
    for timeout in (1, 5, 25):  # on a busy machine it may not have begun within a second
        began = time.monotonic()
        result = run(code, timeout=timeout)
        assert result.error == "timeout" and time.monotonic() - began > timeout
        if result.stdout == ("begun\n" if "begun" in code else ""):
            break
    else:
        pytest.fail("what it said so far is lost")


@linux_only
@pytest.mark.parametrize("code, error", [
    ("x = bytearray(2**30)", "MemoryError"),
    ("import mmap; mmap.mmap(-1, 2**30)", "OSError: [Errno 12] Cannot allocate memory"),
])
def test_too_much_memory(run, code, error):
    assert run(code).error == f"exit code 1: {error}"


def test_too_much_output_and_too_large_a_file(run):
    """Output without end is over long before its time; one byte more than the limit is too much, too."""
    result = run("import sys\nwhile True: sys.stderr.write('x' * 2**20)", timeout=100, max_output_bytes=5000)
    assert result.error == "too much output" and result.stderr == "x" * 5000
    assert run("print('x' * 4999)", max_output_bytes=5000).ok
    assert run("print('x' * 5000)", max_output_bytes=5000).error == "too much output"
    assert "File too large" in run(f"f = open('x', 'wb')\nfor _ in range(2): f.write(bytes({MAX_FILE_BYTES}))").error


WRITES = {
    "a new file": "open(PATH + '/new', 'w')",
    "an existing file": "open(PATH + '/file', 'w').write('spoilt')",
    "by a link": "os.symlink(PATH + '/file', 'link'); open('link', 'w').write('spoilt')",
    "by another process": "import subprocess; subprocess.run(['rm', PATH + '/file'], check=True)",
    "its mode": "os.chmod(PATH + '/file', 0o4755)",
    "its times": "os.utime(PATH + '/file', (1, 1))",
    "its attributes": "os.setxattr(PATH + '/file', 'user.x', b'1')",
}


@pytest.mark.parametrize("how", WRITES)
def test_writing_outside_its_folder(run, tmp_path, how):
    """The program is refused, and what was there is as it was; the same line does its work in a plain Python."""
    place = tmp_path / "outside"
    place.mkdir()
    (place / "file").write_text("as it was")

    def state() -> list:
        return [(path.name, path.stat().st_mode, path.stat().st_mtime, LINUX and os.listxattr(path), path.read_text())
                for path in sorted(place.iterdir())]

    before, code = state(), f"import os\nPATH = {str(place)!r}\n{WRITES[how]}"
    result = run(code)
    if ("modes" if how.startswith("its") else "files") in result.unprotected:
        pytest.skip("this machine allows no walls around files")
    assert not result.ok and state() == before
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert state() != before


def test_reading_the_environment(run, monkeypatch):
    """Neither its own nor that of any process it can see; a plain process shows the secret both ways."""
    monkeypatch.setenv("NANOCHAT_SECRET", "a secret to keep")
    code = "import os\nprint(dict(os.environ))\n"
    code += "for name in os.listdir('/proc') if os.path.exists('/proc') else []:\n"
    code += "  try: print(open(f'/proc/{name}/environ').read())\n  except OSError: pass"
    result = run(code)
    assert result.ok and result.stdout.startswith("{}\n") and "secret" not in result.stdout
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert plain.count("a secret to keep") >= 1 + LINUX


SLEEPER = "[sys.executable, '-I', '-S', '-c', 'import time; time.sleep(1000)', 'MARK']"
BACKGROUND = {
    "a child in a session of its own": "import os, signal, subprocess, sys\nsignal.signal(15, signal.SIG_IGN)\n"
                                       "subprocess.Popen(SLEEPER, start_new_session=True)",
    "a daemon": "import os, sys\nif os.fork() == 0:\n os.setsid()\n"
                " if os.fork() == 0: os.execv(sys.executable, SLEEPER)\n os._exit(0)\nos.wait()",
}


@linux_only
@pytest.mark.parametrize("end", ["", "\nwhile True: pass"], ids=["which ends", "which hangs"])
@pytest.mark.parametrize("how", BACKGROUND)
def test_leaving_something_in_the_background(run, how, end):
    for timeout in (1.5, 7, 35):  # on a busy machine it may not get as far as that in the first of these
        began = time.monotonic()
        result = run(BACKGROUND[how].replace("SLEEPER", SLEEPER)
                     + "\nimport time; time.sleep(0.2); print('it has begun')" + end, timeout=timeout)
        if result.stdout:
            break
    assert result.error == ("timeout" if end else None)
    assert result.stdout == "it has begun\n"
    assert time.monotonic() - began < timeout + 10, "its wait does not end before the child closes the pipe"


@linux_only
@pytest.mark.parametrize("code", [
    "while True:\n try: os.fork(); os.setsid()\n except OSError: pass",
    "while True:\n try: subprocess.Popen(['sleep', '1000', 'MARK'], start_new_session=True)\n except OSError: pass",
])
def test_a_fork_bomb(run, code):
    """Never more processes than allowed, whoever we are (root has no limit of its own), and none at the end."""
    counted = run("import os, time\nfor n in range(50):\n try:\n  if os.fork() == 0: time.sleep(100)\n"
                  " except OSError: break\nprint(n + 1)")
    assert int(counted.stdout) == MAX_PROCESSES, "a small bomb goes further than it may: no large one is tried"
    for timeout in (1.5, 7, 35):  # a busy machine may not see it go off in the first of these
        counts, mark = [0], next(marks)
        with ThreadPoolExecutor(1) as pool:
            running_bomb = pool.submit(run, "import os, subprocess, time\n" + code, timeout, mark)
            while not running_bomb.done():
                counts.append(len(running(str(mark))))
            result = running_bomb.result()
        assert result.error == "timeout" or result.error.startswith("exit code 1: BlockingIOError")
        assert max(counts) <= MAX_PROCESSES + 2, "with supervisor and init"
        if max(counts) > MAX_PROCESSES // 2 or "except" not in code:
            break
    else:
        pytest.fail("it was no bomb")


def test_no_network(run):
    """Not even to this machine: our server hears of no one, but for a plain client."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=5)"
        result = run(code)
        if "network" in result.unprotected:
            pytest.skip("this machine allows no network namespaces")
        assert not result.ok
        with pytest.raises(TimeoutError):
            server.accept()
        subprocess.run([sys.executable, "-c", code], check=True)
        server.accept()[0].close()


def test_a_folder_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, capsys):
    """The program is judged all the same. While it runs, the place of its folder goes to another user."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run_python, "import os\nwhile os.stat('..').st_mode & 0o222: pass\nprint('done')", 100)
        wait_for(lambda: list(tmp_path.iterdir()))
        (left,) = tmp_path.iterdir()
        if os.geteuid() == 0:
            os.chown(tmp_path, 12345, 12345)  # root's own would still be root's in its namespace
        tmp_path.chmod(0o555)
        result = result.result()
    tmp_path.chmod(0o755)
    assert result.ok and result.stdout == "done\n"
    if not left.exists():
        pytest.skip("without namespaces root removes everything")
    warning = f"warning: the folder {left} of a program could not be removed: PermissionError"
    assert warning in capsys.readouterr().out


@linux_only
def test_other_processes_are_out_of_sight(run):
    """The program sees itself and init; a plain one sees us."""
    code = ("import glob\nfor name in glob.glob('/proc/[0-9]*/cmdline'):\n    try:\n"
            "        print(open(name, errors='replace').read())\n    except OSError:\n        pass  # it has ended")
    mark = str(next(marks))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)", mark]) as other:
        result = run(code)
        plain = subprocess.check_output([sys.executable, "-c", code], text=True)
        other.kill()
    if "sight" in result.unprotected:
        pytest.skip("this machine allows no /proc of its own")
    assert mark in plain and mark not in result.stdout and result.stdout.count("sandbox.py") == 2


def test_other_processes_are_out_of_reach(run):
    with subprocess.Popen(["sleep", "100"]) as other:
        result = run(f"import os, signal; os.kill({other.pid}, signal.SIGTERM)")
        alive = other.poll() is None
        other.kill()
    if "processes" in result.unprotected:
        pytest.skip("this machine allows no process namespaces")
    assert alive and result.error == "exit code 1: ProcessLookupError: [Errno 3] No such process"


def test_many_at_a_time_from_threads(run):
    """Good and bad ones together, none on the main thread, each with its own output."""
    expected = [(f"{i}\n", None if i % 3 else f"exit code 1: ValueError: {i}") for i in range(12)]
    codes = [f"print({i})\nif {i} % 3 == 0: raise ValueError({i})" for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        assert [(result.stdout, result.error) for result in pool.map(run_python, codes)] == expected


@linux_only
@pytest.mark.parametrize("who,how", [("trainer", signal.SIGKILL), ("trainer", signal.SIGINT),
                                     ("supervisor", signal.SIGKILL)])
def test_nothing_is_left_when_someone_in_between_is_gone(tmp_path, who, how):
    """The trainer is killed or interrupted while a program runs: its supervisor ends it in time. Or the supervisor."""
    mark = next(marks)
    # Ctrl-C as in the foreground: started in the background by a shell, this process and its children would ignore it.
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"import tempfile\nfrom nanochat.tasks.execution import run_python\ntempfile.tempdir = {str(tmp_path)!r}\n"
    code += f"print(run_python('while True: pass', 10, {mark}).error)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    wait_for(lambda: len(running(str(mark))) == 4)  # the trainer, supervisor, init, program
    assert len(list(tmp_path.iterdir())) == 1
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if who == "trainer" else int(children[0]), how)
    assert process.communicate(timeout=200)[0] == ("" if who == "trainer" else "killed\n")
    wait_for(lambda: not running(str(mark)))
    if who == "trainer":
        assert not list(tmp_path.iterdir())


@linux_only
def test_a_program_that_outlives_its_wait_has_failed(tmp_path, monkeypatch):
    """Its supervisor is stopped, as a program can do that is not walled in: the wait ends, and nothing runs on."""
    monkeypatch.setattr(nanochat.tasks.execution, "GRACE_S", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = next(marks)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run_python, "while True: pass", 1, mark)
        wait_for(lambda: list(tmp_path.iterdir()))
        (folder,) = tmp_path.iterdir()  # its name has the supervisor's process id
        os.kill(int(folder.name.split("-")[1]), signal.SIGSTOP)
        assert result.result(timeout=300).error == "killed"
    wait_for(lambda: not running(str(mark)))


WITHOUT_NAMESPACES = """
import json, os, sys
sys.path.insert(0, {repo!r})
from nanochat.tasks.execution import run_python

def others():
    names = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [name for name in names if open(f"/proc/{{name}}/stat").read().rpartition(")")[2].split()[0] != "Z"]

before = others()
for code in {codes!r}:
    print(json.dumps(run_python(code, 1 if "while True" in code else 100)))
assert others() == before, "processes are left"
"""


@linux_only
def test_where_namespaces_are_not_allowed(tmp_path):
    """
    Tried in a user namespace that forbids further ones (and a process namespace, so that what goes wrong stays there):
    what could not be guarded is said; descendants die all the same; Landlock, where it is there, guards the files.
    """
    daemon = BACKGROUND["a daemon"].replace("SLEEPER", SLEEPER)
    (tmp_path / "file").write_text("as it was")
    codes = ["print(1)", daemon, daemon + "\nwhile True: pass", "while True: pass",
             f"open({str(tmp_path / 'file')!r}, 'w')",
             "open('x', 'w').write('x'); print(open('x').read()); print('nothing', file=open('/dev/null', 'w'))"]
    script = tmp_path / "script.py"
    script.write_text(WITHOUT_NAMESPACES.format(repo=str(REPO), codes=codes))
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    unshare = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "sh", "-c", shell, "sh"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces, so the other tests were about what this one is for")
    done = subprocess.run([*unshare, sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = [Result(*json.loads(line)) for line in done.stdout.splitlines()]
    landlock = ctypes.CDLL(None).syscall(444, None, 0, 1) > 0
    unprotected = ["network", "sight", "processes", "modes"] + ["files"] * (not landlock)
    assert all(result.unprotected == unprotected for result in results)
    assert [result.ok for result in results] == [True, True, False, False, not landlock, True]
    assert results[2].error == results[3].error == "timeout" and results[5].stdout == "x\n"
    assert (tmp_path / "file").read_text() == "as it was" or not landlock
