"""
Conversations and their tokens: what a dialogue looks like to the model, and which of its tokens are trained.

    {"messages": [{"role": "user", "content": "What is 12 * 3?"},
                  {"role": "assistant", "content": [{"type": "python", "text": "12 * 3"},
                                                    {"type": "python_output", "text": "36"},
                                                    {"type": "text", "text": "It is 36."}]}]}

User and assistant take turns, the user first; a system message may come before them and joins the first user turn.
What clients of a server send may be in any order: see `turns_of`.
"""
from typing import Any, NamedTuple

from nanochat.data.tokenizer import Tokenizer
from nanochat.runtime.errors import UserError

ROLES = ("system", "user", "assistant")
# Kind of part -> the special tokens around it, and whether the assistant is the one who writes it.
PARTS = {
    "text": ("", "", True),
    "python": ("<|python_start|>", "<|python_end|>", True),
    "python_output": ("<|output_start|>", "<|output_end|>", False),
}

Conversation = dict[str, Any]


class Rendered(NamedTuple):
    ids: list[int]
    mask: list[int]     # 1 for what the assistant writes, its <|assistant_end|> included; 0 for all that is only read
    cut: int            # messages left out because the conversation would not fit


def check_conversation(conversation: Conversation, where: str = "conversation", any_order: bool = False) -> None:
    """
    UserError, beginning with `where`, for anything that `render` would not take, and unless any_order for anything but
    turns as described above.
    """

    def require(condition: bool, problem: str) -> None:
        if not condition:
            raise UserError(f"{where}: {problem}")

    is_dialogue = isinstance(conversation, dict) and isinstance(conversation.get("messages"), list)
    require(is_dialogue, 'expected {"messages": [...]}')
    messages = conversation["messages"]
    for number, message in enumerate(messages, 1):
        complete = isinstance(message, dict) and "role" in message and "content" in message
        require(complete, f"message {number} needs a role and a content")
        role, content = message["role"], message["content"]
        require(role in ROLES, f"message {number} has role {role!r}; expected one of {', '.join(ROLES)}")
        if isinstance(content, list):
            require(role == "assistant", f"message {number}: only the assistant's content may have parts")
            for part in content:
                fine = isinstance(part, dict) and part.get("type") in PARTS and isinstance(part.get("text"), str)
                expected = f"expected a type ({', '.join(PARTS)}) and a text"
                require(fine, f"message {number} has the part {part!r:.80}; {expected}")
        else:
            require(isinstance(content, str), f"message {number}: its content is neither text nor a list of parts")
    turns = [message["role"] for message in messages]
    if any_order:
        return require(bool(turns), "there are no messages")
    if turns[:1] == ["system"]:
        turns = turns[1:]
    require("system" not in turns, "a system message can only come first")
    require(bool(turns), "there are no messages of user and assistant")
    taken = turns == (["user", "assistant"] * len(turns))[: len(turns)]
    require(taken, f"user and assistant must take turns, the user first: {' '.join(turns)}")


def render(tokenizer: Tokenizer, conversation: Conversation, max_tokens: int | None = None) -> Rendered:
    """
    The tokens of a conversation that begins with <|bos|>, for training. Beyond max_tokens it is cut before the user's
    turn that would not fit with its answer; nothing is left (no ids) where not even the first exchange fits.
    """
    ids, mask = [tokenizer.get_bos_token_id()], [0]
    fits = 1, 0  # tokens and messages up to the last answer that fits
    messages = turns_of(conversation["messages"])
    for number, message in enumerate(messages, 1):
        for text_ids, trained in pieces(tokenizer, message):
            ids += text_ids
            mask += [int(trained)] * len(text_ids)
        if max_tokens is not None and len(ids) > max_tokens:
            break
        if message["role"] == "assistant":
            fits = len(ids), number
    end, kept = fits if fits[1] else (0, 0)
    return Rendered(ids[:end], mask[:end], len(messages) - kept)


def render_prompt(tokenizer: Tokenizer, conversation: Conversation, continue_last: bool = False) -> list[int]:
    """
    The tokens up to where the assistant has to write. An answer at the end of the conversation is left out, or, with
    continue_last, is the beginning of what the assistant writes.
    """
    turns = turns_of(conversation["messages"])
    begun = turns.pop()["content"] if turns[-1]["role"] == "assistant" else ""
    turns.append({"role": "assistant", "content": begun if continue_last else ""})
    ids = [token for turn in turns for part, _ in pieces(tokenizer, turn) for token in part]
    return [tokenizer.get_bos_token_id(), *ids[:-1]]  # without <|assistant_end|>


def plain_text(conversation: Conversation) -> str:
    """The messages as paragraphs of one text, without saying whose they are."""
    contents = [parts(message["content"]) for message in conversation["messages"]]
    return "\n\n".join("".join(part["text"] for part in content) for content in contents)


def render_text(tokenizer: Tokenizer, conversation: Conversation) -> list[int]:
    """The tokens for a base model, which knows no turns: a text that it continues."""
    return [tokenizer.get_bos_token_id(), *tokenizer.encode(plain_text(conversation))]


def turns_of(messages: list[dict]) -> list[dict]:
    """
    Messages in any order as turns: what the assistant said in a row is one turn, and so is what system and user said; a
    blank line is between two texts of a turn. The first turn may be the assistant's.
    """
    turns: list[dict] = []
    for message in messages:
        role, content = "assistant" if message["role"] == "assistant" else "user", message["content"]
        if turns and turns[-1]["role"] == role:
            content = joined(turns.pop()["content"], content)
        turns.append({"role": role, "content": content})
    return turns


def joined(first: str | list[dict], second: str | list[dict]) -> str | list[dict]:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    before, after = parts(first), parts(second)
    are_texts = before and after and before[-1]["type"] == after[0]["type"] == "text"
    return [*before, *[{"type": "text", "text": "\n\n"}] * bool(are_texts), *after]


def parts(content: str | list[dict]) -> list[dict]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def pieces(tokenizer: Tokenizer, message: dict):
    """(ids, whether they are trained) of a message's parts in order, its special tokens around them."""
    role, content = message["role"], message["content"]
    yield [tokenizer.encode_special(f"<|{role}_start|>")], False
    for part in parts(content):
        start, end, written = PARTS[part["type"]]
        ids = tokenizer.encode(part["text"])
        if start:
            ids = [tokenizer.encode_special(start), *ids, tokenizer.encode_special(end)]
        yield ids, role == "assistant" and written
    yield [tokenizer.encode_special(f"<|{role}_end|>")], role == "assistant"
