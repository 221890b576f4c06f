"""
A process that takes itself for one with eight H100s, on a machine without a GPU: for bench.gpu_dry_run. Its "cuda"
tensors are FakeTensors, which have shapes and no memory; its kernels are compiled for sm_90 and never run.

It takes torch's CUDA build, whose autograd asks the driver how many devices there are: a stand-in for libcuda.so.1
answers, built with gcc and preloaded.
"""
import atexit
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from nanochat.errors import UserError

# Functions of the driver that torch's libraries are linked to. None of them is ever to do anything.
DRIVER = """cuCtxGetCurrent cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute cuDevicePrimaryCtxGetState
cuDevicePrimaryCtxRetain cuFuncGetAttribute cuFuncSetAttribute cuFuncSetCacheConfig cuGetErrorString
cuLaunchCooperativeKernel cuLaunchKernel
cuLinkAddData_v2 cuLinkComplete cuLinkCreate_v2 cuModuleGetFunction cuModuleLoad cuModuleLoadData cuModuleLoadDataEx
cuModuleUnload cuOccupancyMaxActiveBlocksPerMultiprocessor cuPointerGetAttribute cuTensorMapEncodeTiled"""
DEVICE_COUNT = "_ZN3c104cuda12device_countEv"  # c10::cuda::device_count()
H100 = SimpleNamespace(  # what inductor and Triton ask for, as torch reports an H100 SXM
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=85_017_493_504,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, L2_cache_size=50 * 2**20, gcnArchName="",
)


def enter() -> None:
    """
    Start this module's process again with the stand-in, unless it has it; then everything that asks for the GPU gets
    the H100. UserError, one line, for what is missing.
    """
    if torch.version.cuda is None:
        raise UserError(f"torch {torch.__version__} is no CUDA build; this takes one, gcc, and no GPU: docs/gpus.md")
    if shutil.which("gcc") is None:
        raise UserError("there is no gcc, which builds the stand-in for the driver: sudo apt install gcc")
    if "FAKE_GPU" not in os.environ:
        if torch.cuda.is_available():
            raise UserError("there is a GPU here, which is better: bash bench/gpu_first_hour.sh")
        folder = tempfile.mkdtemp()
        library = Path(folder, "libcuda.so.1")
        functions = [f"int {name}() {{ return 0; }}" for name in DRIVER.split()]
        functions += ["signed char fake_gpus = 0;", f"signed char {DEVICE_COUNT}() {{ return fake_gpus; }}"]
        command = ["gcc", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-xc", "-"]
        subprocess.run(command, input="\n".join(functions), text=True, check=True)
        os.environ |= {"FAKE_GPU": folder, "LD_PRELOAD": str(library), "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                       "TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_COMPILE_THREADS": "1",
                       "TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
        os.execv(sys.executable, sys.orig_argv)
    atexit.register(shutil.rmtree, os.environ["FAKE_GPU"], ignore_errors=True)
    pretend()


def pretend() -> None:
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    def answer(value):
        return lambda *_, **__: value

    with FakeTensorMode():  # once without devices: what it asks for at first would start them
        pass
    ctypes.c_byte.in_dll(ctypes.CDLL(None), "fake_gpus").value = 8
    torch.cuda.is_available = answer(False)  # or creating a FakeTensor would start the driver
    for place in (torch.cuda, CudaInterface, CudaInterface.Worker):
        for name, value in dict(get_device_properties=H100, current_device=0, get_device_capability=(9, 0),
                                get_device_name=H100.name, get_compute_capability=90, is_bf16_supported=True,
                                synchronize=None).items():
            if hasattr(place, name):
                setattr(place, name, answer(value))
    CudaInterface.is_available = answer(True)
    shared = dict(max_shared_mem=H100.shared_memory_per_block_optin, multiprocessor_count=H100.multi_processor_count)
    driver.set_active(SimpleNamespace(
        utils=SimpleNamespace(get_device_properties=answer(shared)), get_current_device=answer(0),
        get_current_target=answer(GPUTarget("cuda", 90, 32)), get_current_stream=answer(0),
        get_active_torch_device=answer(torch.device("cuda", 0)),
    ))
