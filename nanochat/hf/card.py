"""The model card of an exported folder: what the model is, and how to use it."""

from nanochat.hf.model_files import is_modern
from nanochat.hf.tokenizer_files import TABLES
from nanochat.model.gpt_config import GPTConfig

CODE = """\
transformers has no class for this architecture. The folder brings the code of the model, which \
`trust_remote_code=True` runs, as in `AutoModelForCausalLM.from_pretrained("this folder", trust_remote_code=True)`; \
`AutoTokenizer` asks for the same. It has no cache: each new token takes a pass over all tokens before it.

"""
CALCULATOR = """
## The calculator

Between `<|python_start|>` and `<|python_end|>` the model asks for a calculation, and expects its result between \
`<|output_start|>` and `<|output_end|>`. transformers does not compute it: the model then guesses the result. As \
parts of a message: `{"role": "assistant", "content": [{"type": "python", "text": "12 * 3"}, {"type": \
"python_output", "text": "36"}, {"type": "text", "text": "It is 36."}]}`.
"""


def model_card(source: str, model_tag: str, meta: dict, parameters: int) -> str:
    """README.md of the export of a checkpoint."""
    config = GPTConfig(**meta["model_config"])
    trained = f", trained on `{meta['data']}`" if meta.get("data") else ""
    trust = code = ""
    if is_modern(config):
        trust = ", trust_remote_code=True"
        code = CODE
    prompt = '[{"role": "user", "content": "Who are you?"}]'
    tool = CALCULATOR
    if source == "base":
        prompt = '"The opposite of deep is"'
        tool = ""
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanochat
---

# {model_tag}, {source}

Step {meta["step"]:,} of {TABLES['stages'][source]}{trained}. {parameters:,} parameters: {config.n_layer} layers of \
width {config.n_embd}, {config.n_head} heads, {config.n_kv_head} key heads, {config.vocab_size:,} tokens; rows of up \
to {config.sequence_len:,} tokens.

## Use

```python
from transformers import pipeline

write = pipeline("text-generation", model="this folder"{trust})
print(write({prompt}, max_new_tokens=64))
```

{code}With transformers 5 or newer. `<|bos|>` is put in front of every text and conversation automatically.

## Special tokens in a text

`apply_chat_template` never lets what a message says become a special token: `<|user_end|>` in it is encoded as the \
text it is, as in training. For that the template puts the noncharacters U+FDD0 U+FDD1 between `<` and `|`, and the \
tokenizer removes them; a text that has this pair, or U+FDD0 U+FDD2, loses it.

`tokenizer(text)` does find special tokens in a text. What others wrote is safe with \
`tokenizer(text, split_special_tokens=True)`.
{tool}"""
