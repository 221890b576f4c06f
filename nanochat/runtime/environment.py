"""What this process and its children read from the environment when torch is loaded."""
import getpass
import os
import sys
import tempfile

# Rounds that a waiting OpenMP thread spins: 1,000 cost a seventh of the speed, the default of 300,000 nine tenths on a
# busy machine.
SPINS = "10000"


def set_environment() -> None:
    """Called before torch is imported. What the user has set stays."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    # torch 2.13 would use cached kernels that it compiled for another instruction set, and compute wrong numbers.
    if isa := os.environ.get("ATEN_CPU_CAPABILITY"):
        cache = f"{tempfile.gettempdir()}/torchinductor-{getpass.getuser()}-{isa}"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    # Containers often forbid bytecode; then each start of a script compiles torch's modules again, for 3 to 8 seconds.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
