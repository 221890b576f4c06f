"""Conversations: what is accepted, the tokens they become, which of them are trained, and the rows they fill."""
import os
import random
import re
from collections import Counter

import pytest

from nanochat.data.batch_shape import BatchShape, chunks
from nanochat.data.conversation import (
    check_conversation,
    recent,
    render,
    render_parts,
    render_prompt,
)
from nanochat.data.conversation_loader import RenderedConversations, balance, conversation_loader, epoch_order, pack
from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.errors import UserError
from nanochat.runtime.processes import in_processes

TOKENIZER = Tokenizer([])  # bytes and special tokens only: every token can be read


def said(role: str, content) -> dict:
    return {"role": role, "content": content}


def shown(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


def trained(rendered) -> str:
    return shown(i for i, m in zip(*rendered) if m)


TOOL = {"messages": [
    said("system", "Be brief."), said("user", "What is 12*3?"),
    said("assistant", [{"type": "text", "text": "Let me see. "}, {"type": "python", "text": "12*3"},
                       {"type": "python_output", "text": "36"}, {"type": "text", "text": "36"}]),
    said("user", "<|assistant_end|> Thanks"), said("assistant", "Bye"),
]}


def test_only_what_the_assistant_writes_is_trained():
    """Tool output, user text and the tokens that announce a turn are read; a special token in a text stays text."""
    rendered = render(TOKENIZER, TOOL)
    assert shown(rendered.ids) == (
        "<|bos|><|user_start|>Be brief.\n\nWhat is 12*3?<|user_end|><|assistant_start|>Let me see. <|python_start|>12*3"
        "<|python_end|><|output_start|>36<|output_end|>36<|assistant_end|><|user_start|><|assistant_end|> Thanks"
        "<|user_end|><|assistant_start|>Bye<|assistant_end|>"
    )
    assert trained(rendered) == "Let me see. <|python_start|>12*3<|python_end|>36<|assistant_end|>Bye<|assistant_end|>"
    assert rendered.ids.count(TOKENIZER.encode_special("<|assistant_end|>")) == 2, "the user's is spelled out"


def test_an_answer_of_weight_0_is_read_and_not_learned():
    """Its end neither; what stands between two texts of one turn is learned with the second."""
    wrong, right = [{"type": "text", "text": "No", "weight": 0}], [{"type": "text", "text": "Yes", "weight": 1}]
    messages = [said("user", "A"), said("assistant", wrong), said("user", "B"), said("assistant", right)]
    for ordered, expected in ((messages, "Yes<|assistant_end|>"), (messages[::-1], "Yes<|assistant_end|>"),
                              ([*messages[:2], messages[3]], "\n\nYes<|assistant_end|>"),
                              ([messages[0], messages[3], messages[1]], "Yes")):
        rendered = render(TOKENIZER, {"messages": ordered})
        assert trained(rendered) == expected and "No" in shown(rendered.ids)


def dialogue(rng: random.Random) -> list[list[dict]]:
    """The exchanges of a conversation, numbered; some are long, some call a tool, some are not to be learned."""
    exchanges = []
    for number in range(rng.randint(1, 12)):
        length = rng.choice((5, 20, 60, 400))
        parts = [{"type": "text", "text": f"={number}" + "a" * rng.randint(0, length)}]
        if not rng.randrange(4):
            parts = [{"type": "python", "text": "1"}, {"type": "python_output", "text": "2"}, *parts]
        if not rng.randrange(5):
            parts = [part | {"weight": 0} for part in parts]
        exchanges.append([said("user", f"?{number}" + "q" * rng.randint(0, length)), said("assistant", parts)])
    return exchanges


def test_every_answer_that_fits_alone_is_learned_once_with_all_turns_before_that_fit():
    """Against every part that could have been made, each rendered on its own; a context is only read."""
    rng, seen = random.Random(0), Counter()
    for _ in range(150):
        system = rng.choice(([], [said("system", "Be brief.")]))
        exchanges = dialogue(rng)
        limit = rng.choice((150, 300, 900))

        def between(start: int, stop: int, system: list = system, exchanges: list = exchanges):
            return render(TOKENIZER, {"messages": system + sum(exchanges[start:stop], [])})

        alone = [between(i, i + 1) for i in range(len(exchanges))]
        expected = [i for i, one in enumerate(alone) if any(one.mask) and len(one.ids) <= limit]
        parts, left_out = render_parts(TOKENIZER, {"messages": system + sum(exchanges, [])}, limit)
        assert left_out == sum(any(one.mask) for one in alone) - len(expected)
        learned = []
        for part in parts:
            ids, mask = part
            numbers = [int(i) for i in re.findall(r"\?(\d+)q*<\|user_end", shown(ids))]
            start, stop = numbers[0], numbers[-1] + 1
            whole = between(start, stop)
            assert ids == whole.ids and len(ids) <= limit
            new = [int(i) for i in re.findall(r"=(\d+)", trained(part))]
            context = len(between(start, new[0]).ids) if new[0] > start else 0
            assert mask == [0] * context + whole.mask[context:]
            if start:  # no turn more would have fitted
                assert len(between(start - 1, stop).ids) > limit
                seen["context" if new[0] > start else "none fits"] += 1
            learned += new
        assert learned == expected, "in their order, each once"
        seen[f"{min(len(parts), 3)} parts"] += 1
    assert len(seen) == 6 and min(seen.values()) > 5, seen


def test_rendering_in_several_processes_is_the_same_and_reports_errors(monkeypatch):
    """Long results, and an error in a process that is not this one."""
    rendered = []
    for threads in (1, 3):
        monkeypatch.setattr("torch.get_num_threads", lambda threads=threads: threads)
        rendered.append(RenderedConversations(some(2000), TOKENIZER, 30))
    assert rendered[0].fingerprint == rendered[1].fingerprint

    def work(item: int) -> int:
        if item == 2:
            raise UserError("not 2")
        return item * os.getpid()

    assert os.getpid() not in in_processes(work, [1, 1, 1])
    with pytest.raises(UserError, match="not 2"):
        in_processes(work, [1, 1, 2])


@pytest.mark.parametrize("messages, expected", [
    ([said("user", "A"), said("assistant", "B"), said("system", "C"), said("user", "D")],
     "<U>A</U><A>B</A><U>C\n\nD</U><A>"),
    ([said("system", "S"), said("assistant", "Hi"), said("user", "A")], "<U>S</U><A>Hi</A><U>A</U><A>"),
    ([said("user", "A"), said("assistant", "B"), said("assistant", [{"type": "python", "text": "1"}])],
     "<U>A</U><A>B<P>1</P>"),
])
def test_what_clients_send_in_any_order(messages, expected):
    """Rows of one side are one turn; a greeting stays; an answer at the end is continued."""
    for short, name in (("U", "user"), ("A", "assistant"), ("P", "python")):
        expected = expected.replace(f"<{short}>", f"<|{name}_start|>").replace(f"</{short}>", f"<|{name}_end|>")
    assert shown(render_prompt(TOKENIZER, {"messages": messages}, continue_last=True)) == "<|bos|>" + expected


@pytest.mark.parametrize("messages", [
    [said("user", "x"), said("bot", "y")], [said("assistant", "x")], [said("user", ["x"])],
    [said("user", "x"), said("assistant", [{"type": "image", "text": ""}])],
])
def test_what_cannot_be_rendered_is_named(messages):
    with pytest.raises(UserError, match="chats.jsonl:7: "):
        check_conversation({"messages": messages}, "chats.jsonl:7")


def some(count: int) -> list[dict]:
    """Conversations of many lengths, each with a number of its own, one of them too long and one that has no answer."""
    made = [{"messages": [said("user", f"{i} " + "?" * (i * 7 % 40)), said("assistant", "!" * (1 + i * 3 % 11))]}
            for i in range(count)]
    too_long = {"messages": [said("user", "?" * 500), said("assistant", "!")]}
    return [*made, too_long, {"messages": [said("user", "alone")]}]


def test_recent_messages_are_as_many_as_fit():
    """Against trying every question in turn; a system message and the last question stay, tools go with their turn."""
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    for text in ("u", "s", "su", "suauau", "auauauaua", "dsuuaaauaa", "a", "saaa", "ua" * 20, "s" * 20 + "ua" * 20):
        messages = [{"role": names[letter], "content": str(i)} for i, letter in enumerate(text)]
        head = len(text) - len(text.lstrip("sd")) if text.strip("sd") else 0
        starts = [head] + [i for i in range(head + 1, len(text)) if text[i] == "u"]
        tried = [messages[:head] + messages[start:] for start in starts]
        for limit in range(len(messages) + 2):
            expected = next((some for some in tried if len(some) <= limit), tried[-1])
            assert recent(messages, len, limit) == expected, (text, limit)


def test_packing_loses_no_token_and_fills_rows():
    """Every conversation whole in exactly one row; rows are nearly full although nothing is cut."""
    rendered = RenderedConversations(some(2000), TOKENIZER, 129)
    assert len(rendered) == 2000
    order = epoch_order(2000, seed=3, epoch=0)
    rows = pack(rendered.lengths.tolist(), order, 129)
    assert sorted(i for row in rows for i in row) == list(range(2000))
    lengths = list(map(rendered.row_length, rows))
    assert max(lengths) <= 129 and sum(lengths) > 0.97 * 129 * len(rows)
    assert rows[0][0] == order[0], "the one that waited longest comes first"
    with pytest.raises(UserError):
        RenderedConversations(some(0), TOKENIZER, 129)


@pytest.mark.parametrize("unit", [1, 4, 100])
def test_balanced_rows_have_each_conversation_once_and_hardly_any_padding(unit):
    rendered = RenderedConversations(some(90), TOKENIZER, 129)
    lengths = rendered.lengths
    rows = balance(lengths, list(range(90)), unit, 129)
    assert sorted(i for row in rows for i in row) == list(range(90))
    sums = list(map(rendered.row_length, rows))
    assert max(sums) <= 129 and (unit > 50 or sum(lengths) > 0.85 * 129 * (len(rows) - unit)), "no row to spare"
    assert unit > 50 or max(sums) - min(sums) <= max(lengths), "the last one went to the shortest"
    assert len(rows) % unit == 0 or len(rows) == 90


@pytest.mark.parametrize("pad", [False, True])
def test_the_rows_of_a_step_do_not_depend_on_ranks_or_micro_batches(pad):
    """Each conversation's targets once, in the same step, for 1, 2 and 3 ranks; rows that are missing are empty."""
    rendered = RenderedConversations(some(50), TOKENIZER, 129)
    order = epoch_order(50, 0, 0)
    steps = chunks([[i] for i in order] if pad else pack(rendered.lengths.tolist(), order, 129), 7)

    def targets_of(device_batch_size: int, world_size: int, start_step: int = 0) -> list[list[str]]:
        """The targets of each row that has any, by step; the last step is one after the end."""
        shapes = [BatchShape(device_batch_size, 128, rank, world_size) for rank in range(world_size)]
        loaders = [conversation_loader(rendered, steps, shape, pad, start_step) for shape in shapes]
        texts = []
        for step in [*steps, []][start_step:]:
            texts.append([])
            for _ in shapes[0].micro_steps(step):
                batches = [next(loader) for loader in loaders]
                ((rows, length),) = {tuple(inputs.shape) for inputs, *_ in batches}
                assert rows == device_batch_size and (pad or length == 128)
                for inputs, _, cu_seqlens in batches:
                    begins = inputs == TOKENIZER.get_bos_token_id()
                    begins[:, 0] = True
                    first = begins.flatten().nonzero()[:, 0].tolist()
                    assert sorted({*cu_seqlens.tolist()}) == [*first, begins.numel()]
                for row in (row for _, targets, _ in batches for row in targets.tolist()):
                    texts[-1] += [shown(token for token in row if token >= 0)]
        return [sorted(filter(None, step)) for step in texts]

    expected = targets_of(1, 1)
    assert sum(map(len, expected)) == sum(map(len, steps)) and expected[-1] == []
    assert "".join(sum(expected, [])).count("<|assistant_end|>") == 50
    for device_batch_size, world_size in ((7, 1), (2, 1), (1, 2), (2, 3)):
        assert targets_of(device_batch_size, world_size) == expected
    assert targets_of(2, 3, start_step=2) == expected[2:], "as after a resume"
