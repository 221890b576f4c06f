"""
Hosts on one machine: processes with a network, a name and process ids of their own, joined by cables of limited speed.

Each host is a set of Linux namespaces and lives as long as its first process, `cat`, which ends with the pipe that
this process holds: the kernel then ends everything in it and removes its cable, however this process has ended. No
cable leads to the machine's own network.
"""
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ranks import REPO

MTU = 9000  # bytes of a packet: headers are then 0.7% of what is sent
TOOLS = ("ip", "tc", "unshare", "nsenter")

def why_not() -> str | None:
    """What hosts need and this machine does not have; None if they can be made."""
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if sys.platform != "linux" or missing:
        return f"hosts are namespaces of Linux, made with {', '.join(missing or TOOLS)} (packages iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root may make hosts"
    command = ["unshare", "--net", "--pid", "--fork", "ip", "link", "add", "name", "x", "type", "bridge"]
    refused = subprocess.run(command, capture_output=True, text=True)
    return f"this machine makes no namespaces with bridges: {refused.stderr.strip()}" if refused.returncode else None


def sent_by_host() -> int:
    """Bytes that this process's host has sent to others since it was started, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("eth0:"))


class Hosts(contextlib.AbstractContextManager):
    """
    `count` hosts, host0 (10.0.0.1) and so on, on one switch. They know each other's names, and nothing else. rate: what
    each sends and receives ("100mbit"; "": any).
    """

    def __init__(self, count: int, rate: str):
        self.rate, self.names = rate, [f"host{number}" for number in range(count)]
        self.addresses = [f"10.0.0.{number + 1}" for number in range(count)]
        self.files = tempfile.TemporaryDirectory()
        lines = ["127.0.0.1 localhost", *(" ".join(pair) for pair in zip(self.addresses, self.names))]
        Path(self.files.name, "hosts").write_text("\n".join(lines) + "\n")
        self.lives: dict[str, subprocess.Popen] = {}
        self.start_life("switch")
        self.inside("switch", "ip link add name switch type bridge && ip link set switch up")
        for number in range(count):
            self.boot(number)

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self.lives)):
            self.end_life(name)
        self.files.cleanup()

    def start_life(self, name: str) -> None:
        setup = f"mount --bind {self.files.name}/hosts /etc/hosts; hostname {name}; ip link set lo up; echo; exec cat"
        command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", setup]
        life = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert life.stdout.read(1), f"{name} did not start"
        self.lives[name] = life

    def first_process(self, name: str) -> int:
        parent = self.lives[name].pid
        return int(Path(f"/proc/{parent}/task/{parent}/children").read_text())

    def end_life(self, name: str) -> None:
        with contextlib.suppress(ValueError, OSError):  # it is dead already
            os.kill(self.first_process(name), signal.SIGKILL)
        with self.lives.pop(name) as life:
            life.stdin.close()

    def inside(self, name: str, command: str) -> None:
        """Run a command in a host's network only: a process id in it is one of this machine."""
        subprocess.run(["nsenter", f"--target={self.first_process(name)}", "--net", "sh", "-ec", command], check=True)

    def boot(self, number: int) -> None:
        name = self.names[number]
        self.start_life(name)
        limit = "true {}"
        if self.rate:
            limit = f"tc qdisc add dev {{}} root tbf rate {self.rate} burst 128kb latency 200ms"
        ends = f"ip link add {name} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {self.first_process(name)}"
        self.inside("switch", f"{ends}; ip link set {name} master switch up; {limit.format(name)}")
        self.inside(name, f"ip addr add {self.addresses[number]}/24 dev eth0; ip link set eth0 up; "
                          f"{limit.format('eth0')}")

    def launch(self, number: int, arguments: list[str], log: Path, ranks: int, **environment: str) -> subprocess.Popen:
        """runs/multi_node.sh on a host, with so many ranks; what it prints is added to the file `log`."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = {"NNODES": str(len(self.names)), "NODE_RANK": str(number), "NPROC": str(ranks), "PATH": path,
                    "MASTER_ADDR": self.addresses[0], "NANOCHAT_NO_VENV": "1", "OMP_NUM_THREADS": "1"}
        enter = ["nsenter", f"--target={self.first_process(self.names[number])}", "--net", "--uts", "--mount", "--pid",
                 f"--wd={REPO}"]
        with open(log, "a", encoding="utf-8") as output:
            return subprocess.Popen([*enter, "bash", "runs/multi_node.sh", *arguments], stdout=output,
                                    stderr=subprocess.STDOUT, env=os.environ | settings | environment)
