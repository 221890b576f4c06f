"""
Models that write at the pace a test sets, so that no test needs one that happens to be slow enough, or fast enough.

`Pace(file)` is that pace, in this process and in others: set by a test, it holds from the next token on. As a script
this is scripts.chat_web, whose engines keep to the pace in the file that the environment names, PACE.
"""
import json
import os
import runpy
import sys
import time
from pathlib import Path

from nanochat.inference.engine import Engine
from nanochat.serve import gate, served_model, server
from nanochat.serve.served_model import ServedModel


class Pace:
    def __init__(self, file: Path):
        self.file = file
        if not file.exists():
            self.set(0)

    def set(self, seconds: float) -> None:
        """
        At least this long from one step of the engine to the next; math.inf: until it is set anew. The first token of
        an answer that comes to an idle engine follows its prompt at once.
        """
        draft = self.file.with_name(f"{self.file.name}-{os.getpid()}")
        draft.write_text(str(seconds))
        draft.rename(self.file)

    def slow_down(self, engine: Engine) -> Engine:
        """The engine, which keeps to this pace."""
        read, last = engine.model.read, time.monotonic()

        def read_in_time(tokens):
            nonlocal last
            while any(answer.tokens for answer in engine.running) and (
                    time.monotonic() < last + float(self.file.read_text())):
                time.sleep(0.002)
            last = time.monotonic()
            return read(tokens)

        engine.model.read = read_in_time
        return engine


def chat_web(file: Path, *args: str, **constants: float) -> tuple[list[str], dict[str, str]]:
    """
    The command that starts scripts.chat_web with engines of that pace, and its environment. constants: other values of
    limits in nanochat/serve/.
    """
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {"PACE": str(file), "CONSTANTS": json.dumps(constants), "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(path)}
    return [sys.executable, "-m", "pace", *args], os.environ | settings


class PacedModel(ServedModel):
    def __init__(self, id: str, engine: Engine, **settings):
        super().__init__(id, Pace(Path(os.environ["PACE"])).slow_down(engine), **settings)


if __name__ == "__main__":
    served_model.ServedModel = PacedModel
    for name, value in json.loads(os.environ["CONSTANTS"]).items():
        [module] = [module for module in (gate, server) if hasattr(module, name)]
        setattr(module, name, value)
    runpy.run_module("scripts.chat_web", run_name="__main__", alter_sys=True)
