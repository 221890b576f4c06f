"""
Compare our tokenizer with those of GPT-2 and GPT-4: bytes of text per token, higher is shorter.

    python -m scripts.tok_eval --data=tinyworld
"""
from itertools import islice

from configurator import configure

import tiktoken

from nanochat.corpus.learn_tokenizer import bytes_per_token
from nanochat.data.dataset import iter_texts
from nanochat.data.tokenizer import get_tokenizer
from nanochat.runtime.tables import markdown_table

# ---- Data
data = "tinyworld"          # data source whose tokenizer is compared, and whose validation split is one of the texts
num_documents = 1000        # [1..] documents of the validation split
configure(globals())

PROSE = """
The lighthouse keeper had two clocks, and they never agreed. One had come with the house, a tall thing of black oak
that lost four minutes a week in winter and gained three in summer; the other was his own. "Neither of you is right,"
he'd tell them at night while he filled the lamp, "but between you there's an answer." When the inspector came, in the
spring of 1911, he asked which one the log was kept by. The keeper thought it over. "By the ships," he said.
"""
CODE = '''
def moving_average(values: list[float], window: int = 7) -> list[float]:
    """Mean of the last `window` values at every position; shorter at the start."""
    total, means = 0.0, []
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        means.append(total / min(i + 1, window))
    return means


if __name__ == "__main__":
    print([round(mean, 2) for mean in moving_average([3, 1, 4, 1, 5, 9, 2, 6], window=3)])
'''
GERMAN = """
Am frühen Morgen überquerten wir die Brücke und gingen am Fluss entlang, bis der Nebel sich gehoben hatte. Die Bäckerei
öffnete gerade; es roch nach Roggenbrot, und die Verkäuferin grüßte, als hätten wir uns schon hundertmal gesehen.
„Möchten Sie das größere?“, fragte sie. Natürlich wollten wir das größere.
"""
CHINESE = "早上下了一场小雨，院子里的桂花落了一地。外婆说，等太阳出来，就把它们收起来做糖。我们坐在门口，" \
          "一边喝茶，一边等天晴。\n"
texts = {"English prose": [PROSE], "Python": [CODE], "German": [GERMAN], "Chinese": [CHINESE],
         f"{data}, validation": list(islice(iter_texts(data, "val"), num_documents))}

# --- ours, and the others whose vocabulary is there or can be downloaded
encodings = {data: get_tokenizer(data).encoding}


for name, label in (("gpt2", "GPT-2"), ("cl100k_base", "GPT-4")):
    try:
        encodings[label] = tiktoken.get_encoding(name)  # downloads the vocabulary once
    except Exception as error:  # the network has many: the comparison works without
        print(f"{label} is left out: its vocabulary {name!r} was not downloaded ({type(error).__name__})")

# --- the table
rows = [["vocabulary", *(f"{encoding.n_vocab:,}" for encoding in encodings.values())]]
for kind, documents in texts.items():
    rows.append([kind, *(f"{bytes_per_token(encoding, documents):.2f}" for encoding in encodings.values())])
print(markdown_table(["bytes per token", *encodings], rows))
