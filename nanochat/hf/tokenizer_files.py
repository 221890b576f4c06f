"""
Our tokenizer in Hugging Face's format, and the way back.

Both encoders give every text the same ids: tiktoken merges any pair of neighbours that forms a token, `tokenizers` only
the pairs in its list, so the list has them all. Our encoder never turns text into special tokens; theirs may. The chat
template prevents that with characters that are not text.
"""
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from nanochat.data.tokenizer import SPECIAL_TOKENS, Tokenizer, byte_alphabet
from nanochat.runtime.errors import UserError
from nanochat.runtime.files import read_toml

# Noncharacters, which Unicode keeps for such internal use: the template writes them, the tokenizer removes them.
GUARD = "\ufdd0\ufdd1"  # between "<" and "|", so that no text spells a special token: removed before the merges
SEAM = "\ufdd0\ufdd2"   # between two parts of text: removed as well, but nothing is merged across it
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")  # has these two names as placeholders

# transformers.toml says what each of these tables is for.
TABLES = read_toml("hf/transformers.toml")
PROBES = TABLES["probes"]


# ---- Export

def write_tokenizer(tokenizer: Tokenizer, sequence_len: int, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    to_hf(tokenizer).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", TABLES["tokenizer"] | {"model_max_length": sequence_len})
    template = CHAT_TEMPLATE.read_text(encoding="utf-8").replace("GUARD", GUARD).replace("SEAM", SEAM)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def to_hf(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary in the form of tokenizer.json."""
    letters = {byte: char for char, byte in byte_alphabet().items()}
    ranks = {token: rank for rank, token in enumerate(tokenizer.raw_tokens)}
    spelled = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = []
    for token in tokenizer.merges:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        merges += [(spelled[a], spelled[b]) for a, b in pairs if a in ranks and b in ranks]
    # ignore_merges: a piece that equals a token becomes it, even if no merges lead to it, as in tiktoken.
    result = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    result.normalizer = normalizers.Replace(GUARD, "")
    result.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(SEAM, "removed"),
        pre_tokenizers.Split(Regex(tokenizer.pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    result.decoder = decoders.ByteLevel()
    # In front of a plain text, as in front of every document in training.
    bos = ("<|bos|>", tokenizer.get_bos_token_id())
    result.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B:1", special_tokens=[bos])
    result.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL_TOKENS])
    return result


# ---- Import

def from_hf(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json. UserError unless it is byte-level and encodes texts as ours does."""
    letters = byte_alphabet()
    try:
        content = path.read_bytes()
        there = tokenizers.Tokenizer.from_buffer(content)
        document = json.loads(content)
        specials = {added["content"]: added["id"] for added in document["added_tokens"]}
        ranks = {}
        for token, rank in document["model"]["vocab"].items():
            if token not in specials:
                ranks[bytes(letters[char] for char in token)] = rank
        steps = document["pre_tokenizer"]["pretokenizers"]
        (pattern,) = [step["pattern"]["Regex"] for step in steps if "Regex" in step.get("pattern", ())]
    except Exception as error:  # the Rust side has no error class: not JSON, a part missing, not byte-level
        raise UserError(f"{path} cannot be read as a byte-level tokenizer: {type(error).__name__}: {error}") from error
    tokenizer = from_ranks(ranks, pattern, specials, path)
    for probe in PROBES:
        ids, ours = there.encode(probe, add_special_tokens=False).ids, tokenizer.encode(probe)
        if ids != ours:
            raise UserError(f"{path} encodes {probe[:40]!r} as {ids[:8]}, this program's encoder as {ours[:8]}: "
                            "it works in another way")
    return tokenizer


def from_ranks(ranks: dict[bytes, int], pattern: str, specials: dict[str, int], where: Path) -> Tokenizer:
    """
    A tokenizer from the ids of its ordinary and its special tokens. UserError, naming the file `where`, unless the
    bytes have ids 0 to 255, the merges follow without a gap, and then our special tokens in their order.
    """
    tokens = sorted(ranks, key=ranks.get)
    alphabet = [bytes([byte]) for byte in range(256)]
    if sorted(ranks.values()) != list(range(len(tokens))) or tokens[:256] != alphabet:
        raise UserError(f"{where}: its {len(tokens):,} ordinary tokens are not the 256 bytes in their order and then "
                        "merges, with ids from 0 on, as this program's tokenizers have them")
    if specials != {name: len(tokens) + i for i, name in enumerate(SPECIAL_TOKENS)}:
        raise UserError(f"{where} has the special tokens {' '.join(sorted(specials, key=specials.get))}; "
                        f"expected {' '.join(SPECIAL_TOKENS)}, with the ids from {len(tokens)} on")
    return Tokenizer(tokens[256:], pattern)
