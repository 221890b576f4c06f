"""
Evaluate a base model: bits per byte, CORE and samples, and on the embedded world what nothing else can tell: how far the
model is above the corpus's entropy, topic by topic, and whether it answers questions in words it has never read.

    python -m scripts.base_eval                      # the only model there is
    python -m scripts.base_eval --model_tag=d20
"""
import math
from collections import defaultdict

from configurator import configure
from nanochat.checkpoint import find_model, load_checkpoint
from nanochat.compiling import set_compile
from nanochat.core_eval import bundle_dir, core_name, evaluate_core, load_tasks
from nanochat.corpus.eval_bundle import why_no_bundle
from nanochat.dataloader import count_tokens, tokenizing_distributed_data_loader
from nanochat.dataset import iter_texts
from nanochat.distributed import compute_cleanup, compute_init, from_rank0, print0
from nanochat.errors import UserError, require_positive
from nanochat.loss_eval import document_nats, evaluate_bpb, greedy_completes, sample
from nanochat.corpus.tinyworld import entropy_floor
from nanochat.report import write_section
from nanochat.corpus.tinyworld import PROMPTS, floor_bits, held_out_questions, topic_of

# ---- Model
model_tag: str | None = None  # folder of the checkpoints; None: the only one there is
step: int | None = None     # of the checkpoint; None: the newest valid one
device_type = ""            # cuda | mps | cpu; empty: the best there is
# ---- Evaluation
data: str | None = None     # data set to measure on; None: the one it was trained on
device_batch_size = 16      # rows per rank at a time; halve it when memory runs out
eval_tokens = 10485760      # tokens of each split, at most one pass over validation
core_metric_max_per_task = 500  # items of each task of CORE, whose bundle is downloaded if it is not there; -1: all, 0: no CORE
sample_tokens = 32          # tokens of each sample
config = configure(globals())

require_positive(config, "device_batch_size", "eval_tokens", "sample_tokens")
rank, world_size, device = compute_init(device_type)
set_compile(False, device.type)  # shapes change from batch to batch
checkpoint = find_model("base", model_tag, step)
model, tokenizer, meta = load_checkpoint(checkpoint, device)
model.eval()
trained_on, token_bytes = meta.get("data"), tokenizer.token_bytes()
data = data or trained_on
if data is None:
    raise UserError(f"{checkpoint} was imported, and does not say what it was trained on; set --data to what to measure it on")
name = f"step {meta['step']} of {checkpoint.parent.name}, " + (f"trained on {trained_on}" if trained_on else "imported") + f", measured on {data}" * (data != trained_on)
print0(f"model: {name}")

# --- bits per byte on both splits, as in training: rows packed with documents
results: dict[str, float | str] = {}
shape = dict(device_batch_size=device_batch_size, max_seq_len=model.config.sequence_len, rank=rank, world_size=world_size, device=device)
eval_rows = max(min(eval_tokens, count_tokens(data, "val", tokenizer)) // model.config.sequence_len, 1)
eval_steps = math.ceil(eval_rows / (device_batch_size * world_size))
for split, title in (("train", "training"), ("val", "validation")):
    loader = tokenizing_distributed_data_loader(data, split, tokenizer, num_rows=eval_rows, **shape)
    results[f"{title} bits per byte"] = evaluate_bpb(model, loader, eval_steps, token_bytes)
    loader.close()
    print0(f"{title}: {results[f'{title} bits per byte']:.4f} bits per byte")

# --- CORE: tasks that any model of English can try, above guessing
core_lines = []
if core_metric_max_per_task and (reason := from_rank0(why_no_bundle)):
    print0(f"CORE is left out: {reason}")
elif core_metric_max_per_task:
    core_tasks = load_tasks(bundle_dir())
    core, scores = evaluate_core(model, tokenizer, core_tasks, core_metric_max_per_task, device_batch_size * model.config.sequence_len)
    name_of_core = core_name(scores)
    results |= {name_of_core: core} | {f"{name_of_core}: {score.label}": score.centered for score in scores}
    core_lines = ["", "| CORE task | items | accuracy | guessing | centred |", "|---|---:|---:|---:|---:|"]
    for score in scores:
        print0(f"{score.label:32} {score.accuracy:.4f}, centred {score.centered:7.4f}")
        core_lines.append(f"| {score.label} | {score.items:,} | {score.accuracy:.4f} | {score.baseline:.4f} | {score.centered:.4f} |")
    print0(f"{name_of_core}: {core:.4f}")

# --- the usual prompts, greedily
in_tinyworld = entropy_floor(data) is not None
lines = [f"Model: {name}.", "", "| prompt | greedy completion |", "|---|---|"]
for prompt, expected in PROMPTS if rank == 0 else ():
    text = sample(model, tokenizer, prompt, sample_tokens)
    stats = "" if expected is None or not in_tinyworld else " ✓" if text.startswith(f" {expected}") else " ✗"
    print0(f"  {prompt}{text}{stats}")
    lines.append(f"| {prompt} |{text.replace('|', ' ')}{stats} |")

# --- the embedded world: excess over the entropy of each validation document, and held-out questions
if in_tinyworld and rank == 0:
    texts = list(iter_texts(data, "val"))
    documents = tokenizer.encode(texts, prepend=tokenizer.get_bos_token_id())
    by_topic = defaultdict(lambda: [0.0, 0.0, 0])  # the model's bits, the floor's bits, bytes
    for text, (nats, count) in zip(texts, document_nats(model, documents, token_bytes, device_batch_size)):
        for key in (topic_of(text), "all documents"):
            by_topic[key][0] += nats / math.log(2)
            by_topic[key][1] += floor_bits(text)
            by_topic[key][2] += count

    questions = held_out_questions()
    right = greedy_completes(model, tokenizer, [(q.prompt, f" {q.answer}.") for q in questions], device_batch_size)
    asked = defaultdict(list)
    for question, is_right in zip(questions, right):
        asked[question.topic].append(is_right)
        asked["all documents"].append(is_right)

    lines += ["", "| topic | bits per byte | floor | excess | held-out questions |", "|---|---|---|---|---|"]
    print0(f"{'topic':16} bits/byte   floor  excess  held-out questions")
    for topic in sorted(by_topic, key=lambda key: (key == "all documents", key)):
        bits, floor_bits_of_topic, count = by_topic[topic]
        bpb, floor = bits / count, floor_bits_of_topic / count
        answers = f"{sum(asked[topic])}/{len(asked[topic])}" if asked[topic] else "-"
        print0(f"{topic:16} {bpb:9.4f} {floor:7.4f} {bpb - floor:7.4f}  {answers}")
        lines.append(f"| {topic} | {bpb:.4f} | {floor:.4f} | {bpb - floor:.4f} | {answers} |")
    bits, floor_bits_of_all, count = by_topic["all documents"]
    bpb, floor = bits / count, floor_bits_of_all / count
    results |= {
        "bits per byte of validation documents": bpb, "their floor": floor,
        "excess over the floor": f"{bpb - floor:.4f} ({bpb / floor - 1:.1%})", "held-out questions": f"{sum(right) / len(right):.1%}",
    }
    print0(f"excess over the floor: {results['excess over the floor']} bits per byte; held-out questions: {results['held-out questions']}")

if rank == 0:
    write_section("base_eval", "Base model: evaluation", "\n".join(lines + core_lines), {"base": results}, data=trained_on, model_tag=checkpoint.parent.name)
compute_cleanup()
