"""Export and import: transformers itself is the oracle of what leaves, the original bits of what comes back."""
import contextlib
import io
import json
import os
import pickle
import random
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiktoken
import torch
from conftest import ALL_PIECES
from jinja2 import TemplateError
from safetensors.torch import load_file, save_file

from nanochat.corpus.learn_tokenizer import learn_tokenizer
from nanochat.data.conversation import render, render_prompt
from nanochat.data.tokenizer import SPECIAL_TOKENS
from nanochat.hf.model_files import CONFIG
from nanochat.hf.tokenizer_files import GUARD, PROBES, SEAM
from nanochat.inference.engine import Engine
from nanochat.inference.sampling import SamplingParams
from nanochat.model.gpt import GPT
from nanochat.model.gpt_config import GPTConfig, architecture
from nanochat.runtime.errors import UserError
from nanochat.training.checkpoint import checkpoint_dir, load_checkpoint, problem_with, read_meta, step_dir
from nanochat.training.saving import save_weights

TEXT = Path(__file__).read_text(encoding="utf-8") + " a" + "a" * 40 + " ab" * 9 + "ababab"
TOKENIZER = learn_tokenizer([TEXT] * 2, 500)
V = TOKENIZER.get_vocab_size()
CPU = torch.device("cpu")
MALICE = "/malice"  # a file in the base folder that no test may find


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    """transformers, imported only where these tests run, and never looking for a network; code that it loads is here"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import transformers

        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield transformers


def random_model(
    n_kv_head: int = 4, seed: int = 1, softcap: float | None = 15.0, n_layer: int = 3, **pieces
) -> GPT:
    """
    Every weight random, so that no block is the identity and every piece counts, and logits so far apart that a greedy
    token is no coin toss; an embedding so small that another eps of the norm shows.
    """
    model = GPT(GPTConfig(128, V, n_layer, n_embd=64, n_head=4, n_kv_head=n_kv_head, softcap=softcap, **pieces))
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        embedding = 0.02 if name == "transformer.wte.weight" else 0.5
        deviation = 0.25 if "lm_head" in name else embedding if "wte" in name or p.ndim == 1 else p.size(1) ** -0.5
        p.data.normal_(0, deviation, generator=generator)
    return model


def saved(model: GPT, source: str = "sft", tag: str = "tiny") -> Path:
    meta = {"config": {}, "data": "tinyworld"}
    return save_weights(checkpoint_dir(source, tag), 12, model.state_dict(), TOKENIZER, model.config, meta)


def run_script(module: str, settings: dict) -> str:
    """What a script prints; its errors are raised."""
    sys.argv = [module, *(f"--{key}={value}" for key, value in settings.items())]
    printed, hook = io.StringIO(), sys.excepthook
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    finally:
        sys.excepthook = hook
    return printed.getvalue()


def exported(output: Path, **settings) -> Path:
    run_script("scripts.export_hf", {"output": output} | settings)
    return output


def imported(folder: Path, **settings) -> Path:
    """The new checkpoint."""
    printed = run_script("scripts.import_hf", {"input": folder, "model_tag": "back"} | settings)
    return Path(re.search(r"vocabulary padded: (.*)", printed)[1])


def different(a: Path, b: Path) -> list[str]:
    """Names of the tensors in which two checkpoints differ, in a bit, a dtype or a shape."""
    def bits(checkpoint: Path) -> dict[str, tuple]:
        tensors = load_file(checkpoint / "model.safetensors").items()
        return {name: (t.dtype, t.shape, t.contiguous().view(torch.uint8).numpy().tobytes()) for name, t in tensors}

    a, b = bits(a), bits(b)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


# ---- Export


def test_transformers_computes_the_same(hf, tmp_path):
    """
    Logits within 1e-5 (measured: 5e-6, as much as between its own kernels), and 64 greedy tokens, of the same weights
    in float32.
    """
    model = random_model(2, softcap=2.5, rope_theta=300.0).bfloat16()
    saved(model)
    theirs = hf.AutoModelForCausalLM.from_pretrained(exported(tmp_path / "out"))
    assert type(theirs).__name__ == "NanoChatForCausalLM" and theirs.dtype == torch.bfloat16, "as the weights, unasked"
    ours, theirs = model.float(), theirs.float()

    tokens = torch.randint(V, (3, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = ours(tokens)
        assert logits.std() > 1 and torch.allclose(theirs(tokens).logits, logits, rtol=0, atol=1e-5)

    prompt = [TOKENIZER.get_bos_token_id(), *tokens[0, :19].tolist()]
    got = theirs.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=[])[0, 20:].tolist()
    engine = Engine(ours, TOKENIZER)
    engine.stop.clear()
    expected = engine.generate([prompt], SamplingParams(64, temperature=0, tools=False))[0].tokens
    assert got == expected and len(set(expected)) > 10


@pytest.mark.parametrize("piece", [*architecture(ALL_PIECES), None])
def test_a_model_with_any_piece_brings_code_that_computes_the_same(hf, tmp_path, piece):
    """
    Each by itself, and all with other shapes, in bfloat16: the very logits. The code asks for nothing of this program.
    """
    modern = architecture(ALL_PIECES)
    alone = {piece: modern.get(piece)}
    if piece == "narrow_gates":
        alone["value_embeddings"] = True  # which have gates
    model = random_model(**alone) if piece else random_model(2, n_layer=6, **modern).bfloat16()
    saved(model)
    folder = exported(tmp_path / "my.model-1")
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert theirs.dtype == model.lm_head.weight.dtype
    tokens = torch.randint(V, (2, 100), generator=torch.Generator().manual_seed(2))
    tokens[:, ::30] = 3  # begins a document
    with torch.no_grad():
        logits, got = model(tokens, cu_seqlens=model.cu_seqlens_of(tokens)), theirs(tokens).logits
    assert logits.std() > 1 and got.shape == (2, 100, V)
    if piece in ("rope_theta", "embedding_std", "fc_scale"):
        assert not list(folder.glob("*.py")), "transformers' own class has it"
        assert torch.allclose(got, logits, rtol=0, atol=1e-5)
        return
    assert torch.equal(got, logits)
    classic = replace(model.config, **{name: getattr(GPTConfig, name) for name in modern})
    without = GPT(classic)
    without.load_state_dict({name: p for name, p in model.float().state_dict().items() if name in without.state_dict()})
    with torch.no_grad():
        assert (without(tokens) - logits).abs().max() > 0.01, "the piece counts"
    first = (folder / "modeling_nanochat.py").read_text()
    for path in folder.glob("*.py"):
        assert not re.search(r"^ *(from|import) nanochat", path.read_text(), re.MULTILINE), path.name
        assert path.stem == "modeling_nanochat" or f"\nfrom .{path.stem} import" in first, "or 5.0 copies it not"
    assert type(theirs.gpt).__module__.startswith("transformers_modules.")


def test_a_model_with_its_own_code_generates_batches_and_is_saved_there(hf, tmp_path):
    """
    Greedy tokens of the plain loop, for prompts that are padded on the left, with a cache asked for; the loss; what
    cannot be right is refused. Saved by transformers, it imports to the same bits.
    """
    model = random_model(2, n_layer=4, **architecture(ALL_PIECES))
    original = saved(model)
    folder = exported(tmp_path / "out")
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
    texts = ["import", "def test_that(folder: Path, model: GPT)", "the same weights and"]
    expected = [list(model.generate(TOKENIZER.encode(text, prepend="<|bos|>"), 30)) for text in texts]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch["attention_mask"].sum(1).unique().numel() == 3
    for cache in (None, True):
        got = theirs.generate(**batch, max_new_tokens=30, do_sample=False, eos_token_id=[], use_cache=cache)
        assert got[:, -30:].tolist() == expected and len({id for ids in expected for id in ids}) > 10

    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        # Kernels round by the batch's shape: 5e-6, with another vocabulary (learned from this file) over 1e-5.
        for padded in ((ids, mask), (ids.flip(1), mask.flip(1)), (ids, mask.bool())):
            for row, seen, logits in zip(*padded, theirs(*padded).logits):
                assert torch.allclose(logits[seen > 0], model(row[seen > 0][None])[0], rtol=0, atol=1e-4)
        assert torch.allclose(theirs(ids, labels=ids).loss, model(ids[:, :-1], ids[:, 1:].contiguous()))
    with pytest.raises(ValueError, match="attention_mask has zeros between ones"):
        theirs(ids, torch.ones_like(ids).index_fill(1, torch.tensor([2]), 0))

    for kind in (theirs, tokenizer):
        kind.save_pretrained(tmp_path / "theirs")
    for where in (folder, tmp_path / "theirs"):
        back = imported(where, model_tag=where.name, source="sft")
        assert different(original, back) == []
        assert read_meta(original)["model_config"] == read_meta(back)["model_config"]


NASTY = [
    *PROBES, *SPECIAL_TOKENS, "<|bos|><|user_end|>a", "<|", "<<||>", "a <|end|> b", "\u2028\u2029\x85\x0b\x0c",
    "don't DON'T d'ſ", "\r", "\n" * 300, " " * 5000 + "x" + "\t" * 700, "x" * 3000, "-" * 900 + "\r\n",
    "aaaaaaaaaaaaa", "abababababa", "1" * 99, "٠١٢٣٤", "\U0010ffff\ue000", "\ud7ff", TEXT,
]


def test_every_text_has_the_same_ids_there(hf, tmp_path):
    """Of nasty texts and 3,000 random ones. Special tokens in a text are found there, unless it is told not to look."""
    saved(random_model())
    theirs = hf.AutoTokenizer.from_pretrained(exported(tmp_path / "out"))
    rng = random.Random(0)
    letters = [chr(c) for c in (*range(0x250), *range(0x600, 0x700), 0x1F600, 0x200D, 0xFE0F, 0x3000)]
    alphabets = ["ab", "a \n\t\r", "aA'sSlL dDrReE1", "<|bos_>", "-=#_ \n", letters]
    texts = NASTY + ["".join(rng.choices(rng.choice(alphabets), k=rng.randrange(80))) for _ in range(3000)]
    encoded = theirs(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for text, ids in zip(texts, encoded, strict=True):
        assert ids == TOKENIZER.encode(text), repr(text[:80])
        assert TOKENIZER.decode(ids) == theirs.decode(ids) == text
    bos, a, ab, c = theirs.bos_token_id, *map(TOKENIZER.encode, ("a", "ab", "c"))
    assert theirs("a<|bos|>", split_special_tokens=False)["input_ids"] == [bos, *a, bos]
    assert theirs("a" + GUARD + "b" + SEAM + "c")["input_ids"] == [bos, *ab, *c], "the one that is lost"
    assert (theirs.eos_token, theirs.pad_token, len(theirs)) == ("<|assistant_end|>", "<|bos|>", V)
    assert theirs.model_max_length == 128


def conversations(count: int) -> list[dict]:
    """Varied: a system message or none, one to four exchanges, plain answers and parts of all kinds, in any order."""
    rng = random.Random(3)
    texts = [text for text in NASTY if len(text) < 400]
    texts += [" leading", "trailing \n", "Hel", "lo", "<", "|bos|>", "12*3", "{{ messages }}", "{% if x %}", "\\n"]

    def answer():
        if rng.random() < 0.5:
            return rng.choice(texts)
        kinds = rng.choices(("text", "text", "python", "python_output"), k=rng.randrange(6))
        return [{"type": kind, "text": rng.choice(texts)} for kind in kinds]

    found = []
    for _ in range(count):
        messages = [{"role": "system", "content": rng.choice(texts)}] if rng.random() < 0.3 else []
        for _ in range(rng.randrange(1, 5)):
            messages += [{"role": "user", "content": rng.choice(texts)}, {"role": "assistant", "content": answer()}]
        found.append({"messages": messages})
    return found


def test_the_chat_template_renders_what_our_renderer_does(hf, tmp_path):
    """
    200 conversations, whole and as prompts: special tokens spelled in what people say, parts that would be merged with
    their neighbours or together spell a special token, and templates inside of messages.
    """
    saved(random_model())
    theirs = hf.AutoTokenizer.from_pretrained(exported(tmp_path / "out"))
    spelled = 0
    for conversation in conversations(200):
        messages = conversation["messages"]
        spelled += any(name in str(messages) for name in SPECIAL_TOKENS)
        assert theirs.apply_chat_template(messages)["input_ids"] == render(TOKENIZER, conversation).ids, messages
        for prompt in (messages[:-1], messages):  # an answer at the end is to be written again
            ids = theirs.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
            assert ids == render_prompt(TOKENIZER, {"messages": prompt})
    assert spelled > 50
    user, system = ({"role": role, "content": "x"} for role in ("user", "system"))
    for wrong in ([system], [user, user], [user, system]):
        with pytest.raises(TemplateError):
            theirs.apply_chat_template(wrong)


# ---- Import


def test_import_of_an_export_is_the_same_bits(tmp_path):
    """Every tensor, tokenizer and step."""
    model = random_model(2, softcap=30.0, rope_theta=1e5).bfloat16()
    for weight in (model.transformer.wte.weight, model.lm_head.weight):
        weight.data[V:] = 0  # the rows that pad the vocabulary, as after an import
    original = saved(model)
    back = imported(exported(tmp_path / "out"), source="sft")
    assert back == step_dir(checkpoint_dir("sft", "back"), 12)
    assert problem_with(back) is None and different(original, back) == []
    for field in ("model_config", "tokenizer", "step"):
        assert read_meta(original)[field] == read_meta(back)[field]


def classic_folder(folder: Path, model: GPT, step: int = 650, **extra) -> Path:
    """
    A published checkpoint: compiled, embedding in bfloat16, vocabulary as it is; the tokenizer is a real pickled
    tiktoken.Encoding.
    """
    folder.mkdir(exist_ok=True)
    state = model.state_dict()
    state["transformer.wte.weight"] = state["transformer.wte.weight"][:V].bfloat16()
    state["lm_head.weight"] = state["lm_head.weight"][:V]
    state = {f"_orig_mod.{name}": tensor for name, tensor in state.items()}
    torch.save(state | extra, folder / f"model_{step:06d}.pt")
    config = {name: getattr(model.config, name) for name in CONFIG}
    meta = {"step": step, "val_bpb": 0.8, "model_config": config, "user_config": {}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(TOKENIZER_AS_PUBLISHED))
    return folder


RANKS = {token: rank for rank, token in enumerate(TOKENIZER.raw_tokens)}
SPECIAL = {name: len(RANKS) + i for i, name in enumerate(SPECIAL_TOKENS)}
CLASSIC_PATTERN = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|"""
                   r"""\s*[\r\n]|\s+(?!\S)|\s+""")
TOKENIZER_AS_PUBLISHED = tiktoken.Encoding(
    "rustbpe", pat_str=CLASSIC_PATTERN, mergeable_ranks=RANKS, special_tokens=SPECIAL)


def as_published(name="rustbpe", pat_str=CLASSIC_PATTERN, mergeable_ranks=RANKS, special_tokens=SPECIAL):
    """What is pickled as such an encoding, whatever it holds."""
    encoding = tiktoken.Encoding.__new__(tiktoken.Encoding)
    encoding.name, encoding._pat_str = name, pat_str
    encoding._mergeable_ranks, encoding._special_tokens = mergeable_ranks, special_tokens
    return encoding


def test_a_published_checkpoint_becomes_one_of_ours_and_can_be_exported(hf, tmp_path):
    """
    The newest by number; the embedding's bfloat16 values in float32 like the rest; ids as tiktoken gives them, here and
    in transformers.
    """
    model = random_model(2)
    classic_folder(tmp_path / "d3", random_model(2, seed=9), step=999999)
    folder = classic_folder(tmp_path / "d3", model, step=1000000)
    back = imported(folder, source="sft")
    assert back.name == "step_1000000"
    there, tokenizer, meta = load_checkpoint(back, CPU)
    for name, tensor in there.state_dict().items():
        expected = model.state_dict()[name]
        if "wte" in name:
            expected = expected.bfloat16().float()
        if "wte" in name or "lm_head" in name:
            expected[V:] = 0
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected), name
    theirs = hf.AutoTokenizer.from_pretrained(exported(tmp_path / "out"))
    for text in NASTY[:-5]:
        ids = TOKENIZER_AS_PUBLISHED.encode_ordinary(text)
        assert tokenizer.encode(text) == ids, repr(text[:80])
        assert theirs.encode(text, add_special_tokens=False, split_special_tokens=True) == ids, repr(text[:80])


class Malicious:
    """Unpickled, it leaves a file."""

    def __reduce__(self):
        return Path.touch, (Path(os.environ["NANOCHAT_BASE_DIR"] + MALICE),)


def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path, base_folder):
    """As a tokenizer, in one, and among the weights."""
    base_folder.mkdir()
    pickle.loads(pickle.dumps(Malicious()))
    assert Path(str(base_folder) + MALICE).exists(), "it would have"
    Path(str(base_folder) + MALICE).unlink()
    folder = classic_folder(tmp_path / "d3", random_model())
    for what in (Malicious(), as_published(pat_str=Malicious())):
        (folder / "tokenizer.pkl").write_bytes(pickle.dumps(what))
        with pytest.raises(UserError, match="tokenizer.pkl"):
            imported(folder)
    classic_folder(folder, random_model(), stranger=Malicious())
    with pytest.raises(UserError, match="model_000650.pt"):
        imported(folder)
    assert sorted(str(path) for path in base_folder.rglob("*")) == []


# ---- Refusals


def edit_json(name: str, **fields):
    """A fault: a JSON file of the folder with other fields."""
    def damage(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | fields))
    return damage


def with_nan(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors")


def pickled(**fields):
    return lambda folder: (folder / "tokenizer.pkl").write_bytes(pickle.dumps(as_published(**fields)))


HF_FAULTS = {
    "softcap=300.0": edit_json("config.json", final_logit_softcapping=300.0),
    "rope_parameters=": edit_json("config.json", rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
    "model_type='llama'": edit_json("config.json", model_type="llama"),
    "model.layers.2.": edit_json("config.json", num_hidden_layers=2),
    "transformer.h.3.": edit_json("config.json", num_hidden_layers=4),
    "tokenizer.json": edit_json("tokenizer.json", normalizer={"type": "Lowercase"}),
    "lm_head.weight has values that are not finite": with_nan,
}
CLASSIC_FAULTS = {
    "special tokens <|user_start|> <|bos|>":
        pickled(special_tokens=SPECIAL | {"<|bos|>": len(RANKS) + 1, "<|user_start|>": len(RANKS)}),
    "ordinary tokens": pickled(mergeable_ranks=RANKS | {b"zzz": 4000}),
}


def test_what_would_be_another_model_is_refused_and_leaves_nothing(tmp_path, base_folder):
    """One line each that says what it found; the folder of the checkpoints is never made."""
    saved(random_model(), source="rl")
    origins = exported(tmp_path / "hf", source="rl"), classic_folder(tmp_path / "classic", random_model())
    before = sorted(str(path) for path in base_folder.rglob("*"))
    for origin, faults in zip(origins, (HF_FAULTS, CLASSIC_FAULTS), strict=True):
        for message, damage in faults.items():
            shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
            shutil.copytree(origin, tmp_path / "damaged")
            damage(tmp_path / "damaged")
            with pytest.raises(UserError) as caught:
                imported(tmp_path / "damaged")
            assert message in str(caught.value) and "\n" not in str(caught.value), (message, str(caught.value))
    assert sorted(str(path) for path in base_folder.rglob("*")) == before


def test_what_is_there_is_never_replaced(tmp_path):
    saved(random_model())
    (tmp_path / "thesis.txt").write_text("years of work")
    folder = exported(tmp_path / "mine")
    for there in (folder, tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(UserError):
            exported(there)
    imported(folder)
    with pytest.raises(UserError):
        imported(folder)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
