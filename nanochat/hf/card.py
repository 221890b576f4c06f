"""The model card of an exported folder: how to use the model."""
from pathlib import Path


def model_card(source: str, checkpoint: Path, parameters: int) -> str:
    """README.md of the export of a checkpoint. source: its training stage."""
    prompt = '[{"role": "user", "content": "Who are you?"}]'
    if source == "base":
        prompt = '"The opposite of deep is"'
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- nanochat
---

# {checkpoint.parent.name}, {source}

A checkpoint of nanochat, {checkpoint.name}, with {parameters:,} parameters. `config.json` has its shape.

## Use

```python
from transformers import pipeline

write = pipeline("text-generation", model="this folder", trust_remote_code=True)
print(write({prompt}, max_new_tokens=64))
```

With transformers 5 or newer. Where transformers has no class for the architecture, the folder brings the code of the \
model, which `trust_remote_code=True` runs; `AutoModelForCausalLM` and `AutoTokenizer` ask for the same. That code has \
no cache: each new token takes a pass over all tokens before it. `<|bos|>` is put in front of every text and \
conversation automatically.

A chat model asks for a calculation between `<|python_start|>` and `<|python_end|>`, and expects its result between \
`<|output_start|>` and `<|output_end|>`. transformers does not compute it: the model then guesses the result.

## Special tokens in a text

`apply_chat_template` never lets what a message says become a special token. For that the template puts the \
noncharacters U+FDD0 U+FDD1 between `<` and `|`, and the tokenizer removes them; a text that has this pair, or U+FDD0 \
U+FDD2, loses it. `tokenizer(text)` does find special tokens: what others wrote is safe with \
`tokenizer(text, split_special_tokens=True)`.
"""
