"""
scripts.base_train with a fault: once the file $FAULT_AT is there, rank $FAULT_RANK does $FAULT. For bench/faults.py.
"""
import ctypes
import os
import runpy
import signal
import sys
import threading
import time

from nanochat.gpt import GPT

forward = GPT.forward


def fails(*args: object, **settings: object) -> None:
    raise ArithmeticError("a fault of bench/faulty.py")


def holds_the_lock() -> None:
    ctypes.PyDLL(None).sleep(600)  # a function called through PyDLL does not release the interpreter's lock


FAULTS = {
    "exception": lambda: setattr(GPT, "forward", fails),
    "asynchronous exception": lambda: ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident), ctypes.py_object(ArithmeticError)),
    "abort": os.abort,
    "segmentation fault": lambda: ctypes.string_at(0),
    "a thread keeps the lock": holds_the_lock,
} | {name: lambda name=name: os.kill(os.getpid(), getattr(signal, name))
     for name in ("SIGINT", "SIGTERM", "SIGKILL", "SIGSTOP")}


def wait() -> None:
    while not os.path.exists(os.environ["FAULT_AT"]):
        time.sleep(0.01)
    FAULTS[os.environ["FAULT"]]()


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["FAULT_RANK"] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        threading.Thread(target=wait, daemon=True).start()
    sys.argv[0] = "scripts.base_train"
    runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
