"""
What a client of the chat server notices when others come with long prompts, and what the prompt cache saves.

    python -m bench.arrivals
    python -m bench.arrivals --checkouts="., ../before"     # against another version of this repo, in turns

While one client receives a long answer, 15 others come with long prompts, then one with a short one. And a long
conversation goes on: its second turn begins with what was read in the first. The weights are drawn, not trained.
"""
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, median
from typing import Literal

from configurator import configure

from bench.harness import save_chat_model, scratch_base, serving

checkouts = "."             # folders with versions of this repo, whose servers are measured in turns
depth = 4                   # [1..] layers; width and heads follow from it
arch = "modern"             # or "classic", or one of them with changes
context = 2048              # [512..] tokens of a row; long prompts are nearly as long
dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # of weights and cache; auto: bfloat16 where it is fast
long_prompts = 15           # [1..200] clients who come with one
repeats = 3                 # [1..] of each measurement; the medians count
configure(globals())

WORD = " etao"              # one token


def ask(port: int, client: int, messages: list[dict], max_tokens: int) -> tuple[float, list[float], dict, str]:
    """(seconds to the first token, when each event came, usage, text) of the client of that number."""
    connection = http.client.HTTPConnection("127.0.0.1", port, source_address=(f"127.0.0.{client + 2}", 0))
    body = dict(messages=messages, model="bench-sft", stream=True, stream_options={"include_usage": True},
                max_tokens=max_tokens, temperature=0)
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    events, usage, text = [], {}, ""
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            events.append(time.perf_counter())
            event = json.loads(line[6:])
            usage = event["usage"] or usage
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    connection.close()
    return events[0] - start, events, usage, text


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def crowd(port: int) -> dict[str, float]:
    """Seconds to first tokens, and the longest gap in a stream that is running meanwhile."""
    long = WORD * (context - 64)
    with ThreadPoolExecutor(long_prompts + 2) as pool:
        stream = pool.submit(ask, port, 0, [user("Go on.")], context // 2)
        time.sleep(1)
        began = time.perf_counter()
        others = [pool.submit(ask, port, 1 + i, [user(f"{i}{long}")], 8) for i in range(long_prompts)]
        time.sleep(0.5)
        short, *_ = ask(port, 1 + long_prompts, [user("Who are you?")], 8)
        waits = [other.result()[0] for other in others]
        ended = time.perf_counter()
        meanwhile = [moment for moment in stream.result()[1] if began <= moment <= ended]
    gaps = [after - before for before, after in zip(meanwhile, meanwhile[1:])]
    return {"short prompt": short, "long prompts, mean": mean(waits), "last of them": max(waits), "gap": max(gaps)}


def second_turn(port: int, client: int) -> dict[str, float]:
    """Seconds to the first token of both turns of a conversation."""
    messages = [user(f"{client}{WORD * (context // 2)}")]
    first, *_, text = ask(port, client, messages, context // 4)
    messages += [{"role": "assistant", "content": text}, user("And then?")]
    second, _, usage, _ = ask(port, client, messages, 8)
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {"first turn": first, "second turn": second, "its prompt": usage["prompt_tokens"], "of it cached": cached}


with scratch_base():
    save_chat_model(depth, context, arch)
    common = f"--dtype={dtype}", f"--max_batch={long_prompts + 2}", f"--max_new_tokens={context}"
    ways = [(checkout.strip(), ()) for checkout in checkouts.split(",")]
    ways.append((ways[0][0], ("--prompt_cache_mb=0",)))
    found: dict[tuple, list[dict]] = {way: [] for way in ways}
    for turn in range(repeats):
        for checkout, settings in ways:
            with serving(*common, *settings, checkout=checkout) as port:
                ask(port, 0, [user("Hello")], 8)  # the first one warms up
                found[checkout, settings].append(crowd(port) | second_turn(port, 100 + turn))
    print(f"{arch}, depth {depth}, {context} tokens, {dtype}; medians of {repeats}, seconds or tokens")
    for way, results in found.items():
        medians = {name: median(result[name] for result in results) for name in results[0]}
        print(*way[:1], *way[1], " ".join(f"{name} {value:,.3f};" for name, value in medians.items()))
