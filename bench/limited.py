"""
A script with a share of a core's time only:

    python -m bench.limited 0.45 scripts.base_train --depth=4
"""
import runpy
import sys

from bench.harness import limit_cpu

limit_cpu(float(sys.argv[1]))
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
