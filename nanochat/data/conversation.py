"""
Conversations and their tokens: how a dialogue is laid out for the model, and which tokens are trained.

    {"messages": [{"role": "user", "content": "What is 12 * 3?"},
                  {"role": "assistant", "content": [{"type": "python", "text": "12 * 3"},
                                                    {"type": "python_output", "text": "36"},
                                                    {"type": "text", "text": "It is 36."}]}]}

User and assistant take turns, the user first; a system message may come before them and joins the first user turn.
An assistant part with "weight": 0 is read, not learned; if it is a turn's last part, so is the turn's end token.
A server's clients may send messages in any order: see `turns_of`.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.errors import UserError

ROLES = ("system", "user", "assistant")
# Kind of part -> the special tokens around it, and whether the assistant writes it.
PARTS = {
    "text": ("", "", True),
    "python": ("<|python_start|>", "<|python_end|>", True),
    "python_output": ("<|output_start|>", "<|output_end|>", False),
}

Conversation = dict[str, Any]


class Rendered(NamedTuple):
    ids: list[int]
    mask: list[int]     # 1 for tokens that the assistant writes, <|assistant_end|> included; else 0


def check_conversation(conversation: Conversation, where: str) -> None:
    """UserError, beginning with `where`, unless its messages (each has role and content) are turns as above."""
    messages = conversation["messages"]
    for number, message in enumerate(messages, 1):
        role = message["role"]
        content = message["content"]
        if role not in ROLES:
            raise UserError(f"{where}: message {number} has role {role!r}; expected one of {', '.join(ROLES)}")
        if not isinstance(content, str) and (role != "assistant" or not isinstance(content, list)):
            raise UserError(f"{where}: message {number}: its content is no text; only the assistant's may have parts")
        for part in parts(content):
            if not isinstance(part, dict) or part.get("type") not in PARTS or not isinstance(part.get("text"), str):
                raise UserError(f"{where}: message {number} has the part {part!r:.80}; "
                                f"expected a type ({', '.join(PARTS)}) and a text")
            if part.get("weight", 1) not in (0, 1):
                raise UserError(f"{where}: message {number} has weight {part['weight']!r}; "
                                "expected 0 (read, not learned) or 1")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if not turns or turns != (["user", "assistant"] * len(turns))[: len(turns)]:
        raise UserError(f"{where}: user and assistant must take turns, the user first; a system message can only come "
                        f"before them: {' '.join(roles)}")


def render(tokenizer: Tokenizer, conversation: Conversation) -> Rendered:
    """A conversation's tokens for training: <|bos|> and all up to its last answer; none without an answer."""
    ids, mask = [tokenizer.get_bos_token_id()], [0]
    # Messages after the last answer teach nothing and are left out.
    end = 0
    for turn in turns_of(conversation["messages"]):
        for part_ids, trained in pieces(tokenizer, turn):
            ids += part_ids
            mask += [int(trained)] * len(part_ids)
        if turn["role"] == "assistant":
            end = len(ids)
    return Rendered(ids[:end], mask[:end])


def render_parts(tokenizer: Tokenizer, conversation: Conversation, max_tokens: int) -> tuple[list[Rendered], int]:
    """
    A conversation in parts of at most max_tokens, and how many answers are in no part: they are too long even with only
    their question and the system message. Every other answer is learned in exactly one part.

    One part if everything fits. Otherwise each part begins with the system message, then repeats as many earlier
    exchanges as fit (read only). New exchanges take at most half of a part if earlier ones fill the rest. So the parts
    have about twice the conversation's tokens, and an answer has half a part before it.
    """
    whole = render(tokenizer, conversation)
    if len(whole.ids) <= max_tokens:
        return [whole] if any(whole.mask) else [], 0
    messages = conversation["messages"]
    system = [message for message in messages[:1] if message["role"] == "system"]
    turns = turns_of(messages[len(system):])
    user_start = tokenizer.encode_special("<|user_start|>")
    # Where exchanges begin, and the end.
    bounds = [i for i, token in enumerate(whole.ids) if token == user_start] + [len(whole.ids)]
    last = len(bounds) - 1
    # Each exchange alone, with the system message: the shortest part that can hold its answer.
    alone = [render(tokenizer, {"messages": system + turns[2 * i : 2 * i + 2]}) for i in range(last)]

    def tokens(start: int, stop: int) -> int:
        return len(alone[start].ids) + bounds[stop] - bounds[start + 1]

    parts = []
    stop = 0
    # `new` is the first exchange that no earlier part has learned.
    for new in range(last):
        if new < stop or not any(alone[new].mask) or len(alone[new].ids) > max_tokens:
            continue
        start, stop = new, new + 1
        while stop < last and tokens(start, stop + 1) <= max_tokens // 2:
            stop += 1
        while start and tokens(start - 1, stop) <= max_tokens:
            start -= 1
        while stop < last and tokens(start, stop + 1) <= max_tokens:
            stop += 1
        rest = slice(bounds[start + 1], bounds[stop])
        ids = alone[start].ids + whole.ids[rest]
        mask = alone[start].mask + whole.mask[rest]
        before = len(ids) - (bounds[stop] - bounds[new])
        parts.append(Rendered(ids, [0] * before + mask[before:]))
    return parts, sum(any(mask) and len(ids) > max_tokens for ids, mask in alone)


def render_prompt(tokenizer: Tokenizer, conversation: Conversation, continue_last: bool = False) -> list[int]:
    """
    The tokens up to where the assistant writes. An answer at the end of the conversation is left out; with
    continue_last it stays, and the assistant continues it.
    """
    turns = turns_of(conversation["messages"])
    if turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    elif not continue_last:
        turns[-1]["content"] = ""
    ids = render(tokenizer, {"messages": turns}).ids
    # Without <|assistant_end|>: the assistant continues.
    return ids[:-1]


def plain_text(conversation: Conversation) -> str:
    """The messages as paragraphs of one text, without their roles."""
    paragraphs = []
    for message in conversation["messages"]:
        paragraphs.append("".join(part["text"] for part in parts(message["content"])))
    return "\n\n".join(paragraphs)


def render_text(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The tokens for a base model, which knows no turns: a text to continue."""
    return [tokenizer.get_bos_token_id(), *tokenizer.encode(plain_text(conversation))]


def turns_of(messages: list[dict]) -> list[dict]:
    """
    Messages in any order as turns: consecutive assistant messages become one turn, and so do consecutive system and
    user messages, with a blank line between two texts. The first turn may be the assistant's.
    """
    turns: list[dict] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        content = message["content"]
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] = joined(turns[-1]["content"], content)
        else:
            turns.append({"role": role, "content": content})
    return turns


def recent(messages: list[dict], size: Callable[[list[dict]], int], limit: int) -> list[dict]:
    """
    Messages without the oldest turns: as few are left out as a size of at most `limit` requires. System messages at the
    beginning stay, and so do the last question and everything after it, however long they are.
    """
    if size(messages) <= limit:
        return messages
    first = next((i for i, message in enumerate(messages) if message["role"] in ("user", "assistant")), 0)
    starts = [first] + [i for i in range(first + 1, len(messages)) if messages[i]["role"] == "user"]
    kept = messages[:first] + messages[starts.pop() :]
    # From the end: a long conversation is never measured as a whole again.
    for start in reversed(starts):
        more = messages[:first] + messages[start:]
        if size(more) > limit:
            break
        kept = more
    return kept


def joined(first: str | list[dict], second: str | list[dict]) -> str | list[dict]:
    """Two contents as one. Two texts become one text, which is tokenized as a whole."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    together = [*parts(first)]
    after = parts(second)
    if together and after and together[-1]["type"] == after[0]["type"] == "text":
        together.append(after[0] | {"text": "\n\n"})
    return together + after


def text_of(content: str | list[dict]) -> str:
    """What a message's reader sees: no tool calls and no tool output."""
    return "".join(part["text"] for part in parts(content) if part["type"] == "text")


def parts(content: str | list[dict]) -> list[dict]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def pieces(tokenizer: Tokenizer, message: dict):
    """(ids, whether they are trained) of a message's parts in order, with its special tokens around them."""
    role = message["role"]
    yield [tokenizer.encode_special(f"<|{role}_start|>")], False
    trained = role == "assistant"
    for part in parts(message["content"]):
        start, end, written = PARTS[part["type"]]
        trained = role == "assistant" and part.get("weight") != 0
        ids = tokenizer.encode(part["text"])
        if start:
            ids = [tokenizer.encode_special(start), *ids, tokenizer.encode_special(end)]
        yield ids, trained and written
    yield [tokenizer.encode_special(f"<|{role}_end|>")], trained
