"""
A script with a share of a core's time only, looked at every so many µs:

    python -m bench.limited 0.45 2400 scripts.base_train --depth=4
"""
import runpy
import sys

from bench.harness import limit_cpu

limit_cpu(float(sys.argv[1]), int(sys.argv[2]))
del sys.argv[:3]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
