"""
Each kernel run once on this machine, forward and backward, and compared with a plain reference; and what a training step
takes of memory, measured (`peak_of_a_step`, which bench.memory calls in its own process).

    python -m nanochat.plan.probes cpu bfloat16 True          # what scripts.doctor reads: a line of JSON per probe

The kernels run in a process of their own: a kernel that brings it down (a segmentation fault, a CUDA error that poisons the
context) costs that kernel's stats, and the others run in the next process.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 180  # seconds for all of them: a kernel that hangs does not work


class Found(NamedTuple):
    name: str
    ok: bool
    text: str  # the largest error beside what is allowed, or one line why not


def probe_all(device_type: str, dtype: str, compile: bool) -> Iterator[Found]:
    """What works here, one probe after the other; never an error."""
    done: list[str] = []
    while True:
        command = [sys.executable, "-m", "nanochat.plan.probes", device_type, dtype, str(compile), *done]
        # In the repo's folder, whatever the caller's is; one line per probe, before and after it.
        process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        alarm = threading.Timer(TIMEOUT, process.kill)
        alarm.start()
        running = ""
        try:
            for line in process.stdout:
                if not line.startswith("{"):
                    continue  # what some library has to say
                record = json.loads(line)
                running = record["name"] if "ok" not in record else ""
                if "ok" in record:
                    done.append(record["name"])
                    yield Found(**record)
            code = process.wait()
        finally:
            alarm.cancel()
            process.kill()
            process.wait()
        if code == 0:
            return
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not running:
            yield Found("probes", False, f"the process that runs them ended with {how}")
            return
        done.append(running)
        yield Found(running, False, f"ended its process: {how}" + f", after at most {TIMEOUT} s" * (code == -signal.SIGKILL))


def main(device_type: str, dtype_name: str, compile: str, *done: str) -> None:
    import torch
    import torch.nn.functional as F

    from nanochat.attention import attention, reference_attention
    from nanochat.compiling import set_compile
    from nanochat.gpt import GPT, NORM_EPS, Block, GPTConfig, norm, rotary_angles
    from nanochat.loss import cap, softcapped_cross_entropy
    from nanochat.muon import orthogonalize

    device, dtype = torch.device(device_type), getattr(torch, dtype_name)
    compiling = compile == "True"
    set_compile(False, device_type)  # what is probed without saying so is eager
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0, of: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, of)

    def worst(function: Callable, reference: Callable, *inputs: torch.Tensor) -> float:
        """The largest difference of results and gradients from the reference's in float32, relative to the largest entry."""
        results = []
        for f, kind in ((function, dtype), (reference, torch.float32)):
            leaves = [x.detach().to(kind).requires_grad_() for x in inputs]
            y = f(*leaves)
            y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.device, y.dtype))
            results.append([t.detach().float().cpu() for t in (y, *(x.grad for x in leaves))])
        return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*results))

    def exact(x: torch.Tensor) -> torch.Tensor:
        return x.cpu().double()  # not every device has float64

    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    q, k, v = draw(2, 4, 96, 64), draw(2, 2, 96, 64), draw(2, 2, 96, 64)

    def matmul() -> tuple[float, float]:
        return worst(lambda a, b: a @ b, lambda a, b: exact(a) @ exact(b), draw(128, 256), draw(256, 64)), tolerance

    def rms_norm() -> tuple[float, float]:
        return worst(norm, lambda x: exact(x) * (exact(x).square().mean(-1, keepdim=True) + NORM_EPS).rsqrt(), draw(64, 256)), tolerance

    def attention_here() -> tuple[float, float]:
        return worst(attention, reference_attention, q, k, v), tolerance

    def sdpa(backend: str | None = None) -> tuple[float, float]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel([getattr(SDPBackend, backend)] if backend else list(SDPBackend.__members__.values())[1:]):
            # The memory-efficient kernel shares no key heads: each is given to all its queries.
            repeated = lambda q, k, v: F.scaled_dot_product_attention(
                q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
            return worst(repeated, reference_attention, q, k, v), tolerance

    def loss(on: bool = False) -> tuple[float, float]:
        targets = torch.arange(64, device=device) % 100
        set_compile(on, device_type)
        plain = lambda x, head: F.cross_entropy(cap(x @ head.T, 100, 15.0), targets, reduction="sum")
        return worst(lambda x, head: softcapped_cross_entropy(x, head, targets, 100, 15.0), plain, draw(64, 64), draw(128, 64)), tolerance

    def compiled_loss() -> tuple[float, float]:
        return loss(on=True)

    def block() -> Block:
        made = Block(GPTConfig(64, 256, 1, 128, 2, 1)).to(device, dtype)
        for p in made.parameters():
            p.data.copy_(draw(*p.shape, scale=p.size(1) ** -0.5))
        return made

    def compiled_block() -> tuple[float, float]:
        if not set_compile(True, device_type):
            raise RuntimeError("no compiler: torch.compile cannot make kernels here, training runs eagerly")
        made, angles = block(), rotary_angles(64, 64, device)
        plain = Block(GPTConfig(64, 256, 1, 128, 2, 1)).to(device)
        plain.load_state_dict(made.state_dict())  # the same weights, in float32
        eager = torch.compiler.disable(plain.forward)
        quick = torch.compile(made.forward, dynamic=False)
        return worst(lambda x: quick(x, *angles), lambda x: eager(x, *angles), draw(2, 64, 128)), tolerance

    def newton_schulz() -> tuple[float, float]:
        singular = torch.linalg.svdvals(orthogonalize(draw(3, 96, 32)).float())
        return (singular - 1).abs().max().item(), 0.35

    @torch.inference_mode()
    def engine() -> tuple[float, float]:
        from nanochat.engine import Engine
        from nanochat.sampling import SamplingParams
        from nanochat.tokenizer import Tokenizer

        tokenizer = Tokenizer([b"th", b"the", b" the"])
        model = GPT(GPTConfig(64, tokenizer.get_vocab_size(), 2, 64, 4, 2)).to(device)
        for name, p in model.named_parameters():
            p.data.copy_(draw(*p.shape, scale=0.5 if "lm_head" in name else 1 if "wte" in name else 1.5 * p.size(1) ** -0.5, of=torch.float32))
        prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
        answers = Engine(model, tokenizer).generate(prompts, SamplingParams(max_tokens=12, temperature=0, stop=(), tools=False))
        plain = [list(model.generate(prompt, 12, temperature=0)) for prompt in prompts]
        return float(sum(a != b for answer, ids in zip(answers, plain) for a, b in zip(answer.tokens, ids))), 0

    def collectives() -> tuple[float, float]:
        nccl = device_type == "cuda" and torch.cuda.device_count() > 1
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "nanochat.plan.probes", "rank", "nccl" if nccl else "gloo", f"{folder}/store"]
            ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
            try:
                ends = [rank.communicate(timeout=90)[1] for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
            if any(rank.returncode for rank in ranks):
                raise RuntimeError(next((end for end in ends if end.strip()), "a rank died").strip().splitlines()[-1])
        return 0.0, 0

    probes: dict[str, Callable] = {f"matmul, {dtype_name}": matmul, "rms_norm": rms_norm}
    probes["attention, grouped queries"] = attention_here
    if device_type == "cuda":
        probes |= {f"SDPA {name}": (lambda name=name: sdpa(name)) for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")}
    else:
        probes["SDPA"] = sdpa
    probes |= {"loss with softcap": loss, "Muon's Newton-Schulz": newton_schulz, "engine, 2 x 12 tokens": engine}
    if compiling:
        probes |= {"compiled block": compiled_block, "compiled loss": compiled_loss}
    probes["collectives, 2 ranks"] = collectives
    for name, probe in probes.items():
        if name in done:
            continue
        print(json.dumps({"name": name}), flush=True)
        try:
            error, allowed = probe()
            ok, text = error <= allowed, f"error {error:.1e}, allowed {allowed:.1e}"  # NaN is not allowed either
        except Exception as problem:  # whatever a kernel can say: that is the finding
            ok, text = False, next(iter(str(problem).strip().splitlines()), type(problem).__name__)[:160]
        print(json.dumps({"name": name, "ok": bool(ok), "text": text}), flush=True)


def rank_main(backend: str, store: str, rank: str) -> None:
    """One of two ranks: the collectives that training uses, on whole numbers, whose sums are exact."""
    import torch
    import torch.distributed as dist

    from nanochat.distributed import all_gather_single, reduce_scatter

    device = torch.device("cuda", int(rank)) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
    mine = torch.arange(8, dtype=torch.float32, device=device) * (int(rank) + 1)
    total = mine.clone()
    dist.all_reduce(total)
    assert torch.equal(total.cpu(), torch.arange(8.0) * 3), "all_reduce gives other sums"
    own = mine.new_empty(4)
    reduce_scatter(own, mine, dist.group.WORLD).wait()
    assert torch.equal(own, total.view(2, 4)[int(rank)]), "reduce_scatter gives other sums"
    whole = mine.new_empty(8)
    all_gather_single(whole, own)
    assert torch.equal(whole, total), "all_gather gives other rows"
    swapped = torch.empty_like(mine)
    dist.all_to_all_single(swapped, mine)
    assert torch.equal(swapped.cpu(), torch.cat([torch.arange(8.0).view(2, 4)[int(rank)] * (r + 1) for r in (0, 1)])), "all_to_all gives other rows"
    dist.barrier()
    dist.destroy_process_group()


def training_step(config, rows: int, dtype, compiled: bool, checkpointing: bool = False, micro_steps: int = 2, device_type: str = "cpu") -> Callable[[], None]:
    """An optimizer step on drawn tokens, to be called again and again."""
    import torch

    from nanochat.compiling import set_compile
    from nanochat.gpt import GPT
    from nanochat.optimizers import setup_optimizers
    from nanochat.schedule import apply_schedule
    from nanochat.zero import Sharding

    compiled = set_compile(compiled, device_type)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device_type)
    model.init_weights(0)
    model.activation_checkpointing = checkpointing
    sharding = Sharding(model, model.units(), torch.device(device_type), dtype, stage=2)
    optimizers = setup_optimizers(model, sharding)
    if compiled:
        model.compile_blocks()
    tokens = torch.randint(0, config.vocab_size, (rows, config.sequence_len), device=device_type)

    def step() -> None:
        for micro_step in range(micro_steps):
            with sharding.accumulate(last=micro_step == micro_steps - 1):
                loss = model(tokens, tokens)
                loss.backward()
        stats = sharding.reduce_and_clip(loss)
        apply_schedule(optimizers, 1, 10, 1.0)
        for optimizer in optimizers:
            optimizer.step(stats)
        sharding.all_gather_params()

    return step


def peak_of_a_step(config, rows: int, dtype, compiled: bool, checkpointing: bool) -> int:
    """
    Bytes of tensors at the fullest moment of a training step on this CPU, as PyTorch's allocator counts them, beyond what
    is there between two steps (weights, masters, moments). What nanochat.plan.memory.step_bytes is held to.
    """
    from torch.profiler import ProfilerActivity, profile

    step = training_step(config, rows, dtype, compiled, checkpointing)
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def seconds_of_a_step(config, rows: int, dtype, device, compiled: bool, patience: float = 3.0) -> float:
    """Seconds of a training step here: the fastest of those that begin within `patience` seconds after a first one, which compiles."""
    from nanochat.flops import synchronize

    step, times = training_step(config, rows, dtype, compiled, micro_steps=1, device_type=device.type), []
    step()
    synchronize(device)
    start = now = time.perf_counter()
    while now - start < patience:
        began = now
        step()
        synchronize(device)
        now = time.perf_counter()
        times.append(now - began)
    return min(times)


if __name__ == "__main__":
    (rank_main if sys.argv[1] == "rank" else main)(*(sys.argv[2:] if sys.argv[1] == "rank" else sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)  # nothing is left to do that could go wrong
