"""
Your own conversations: a file with one conversation per line, or one JSON list; also as .gz or .zst.

    json:/path/to/file.jsonl        one conversation in 20 is kept for the test split
    json:/path/to/file.jsonl:all    all of them, in both splits

Conversations may have these forms, which other tools use too:

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}    or only the list
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}        ShareGPT
    {"instruction": "Add.", "input": "2 and 3", "output": "5"}                                      Alpaca
    {"prompt": "Hi", "completion": "Hello"}    trl, mlx-lm

"system" beside these is the system message. An answer with "weight": 0 is read, not learned.
"""
import json
from pathlib import Path
from typing import Any

from nanochat.data.conversation import Conversation, check_conversation, parts
from nanochat.data.task import Task
from nanochat.library.own_files import Notes, encoding_of, json_rows, readable, say
from nanochat.runtime.errors import UserError
from nanochat.tasks.common import single_turn, split_of

# One conversation in 20 is for the test split.
TEST_SHARE = 20
ROLES = {"developer": "system", "human": "user", "gpt": "assistant"}


class CustomJSON(Task):
    """
    The conversations of a file that belong to a split. Their own text decides, so equal conversations are never in both
    splits, and lines added later move none. All are checked at the start: UserError with file and line.
    """

    def __init__(self, argument: str, split: str) -> None:
        path = argument.removesuffix(":all")
        self.name = f"json:{path}"
        self.held_out = path == argument
        file = Path(path).expanduser()
        notes = Notes(list)
        with readable(file):
            rows = json_rows(file, encoding_of(file, "utf-8", notes))
            say(notes)
            self.conversations = [read_conversation(row, place) for place, row in rows]
        if self.held_out:
            self.conversations = [conversation for conversation in self.conversations
                                  if split_of(json.dumps(conversation, sort_keys=True), TEST_SHARE) == split]
        if not self.conversations:
            raise UserError(f"{path} has no conversation for the {split} split (one in {TEST_SHARE} is for test); "
                            f"json:{argument}:all takes all of them")

    def __len__(self) -> int:
        return len(self.conversations)

    def conversation(self, index: int) -> Conversation:
        return self.conversations[index]


def read_conversation(row: Any, place: str) -> Conversation:
    """A row in any of the forms as a conversation; UserError, with its place, if it cannot be trained on."""
    fields = present({"messages": row} if isinstance(row, list) else row)
    messages = messages_of(fields)
    if not messages or not isinstance(messages, list):
        raise UserError(f'{place}: there are no messages; expected {{"messages": [...]}}, or "conversations", or '
                        '"instruction" and "output", or "prompt" and "completion"; there is: '
                        f'{", ".join(fields) or type(row).__name__}')
    turns = list(map(read_message, messages))
    if system := fields.get("system"):
        turns.insert(0, {"role": "system", "content": system})
    check_conversation({"messages": turns}, place)
    if turns[-1]["role"] != "assistant":
        raise UserError(f"{place}: the last message must be the assistant's, because only its answers are learned")
    for number, turn in enumerate(turns, 1):
        if turn["role"] == "assistant" and not any(part["text"].strip() for part in parts(turn["content"])):
            raise UserError(f"{place}: message {number} is an empty answer; write one, or remove the conversation")
    return {"messages": turns}


def messages_of(fields: dict) -> Any:
    """The messages of a row in any of the forms."""
    if fields.keys() >= {"instruction", "output"}:
        asked = [str(fields[key]) for key in ("instruction", "input") if fields.get(key)]
        return single_turn("\n\n".join(asked), fields["output"])["messages"]
    if fields.keys() >= {"prompt", "completion"}:
        return single_turn(fields["prompt"], fields["completion"])["messages"]
    return fields.get("messages") or fields.get("conversations")


def read_message(message: Any) -> dict:
    """A message as `check_conversation` expects it. A wrong role or content stays, so the error can name it."""
    fields = present(message)
    role = fields.get("role", fields.get("from"))
    role = ROLES.get(str(role), role)
    content = fields.get("content", fields.get("value"))
    weight = fields.get("weight", 1)
    if role == "assistant":
        if weight != 1 and isinstance(content, (str, list)):
            content = [present(part) | {"weight": weight} for part in parts(content)]
    elif isinstance(content, list) and all(present(part).get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    return {"role": role, "content": content}


def present(row: Any) -> dict:
    """The fields of a row that are not null; none if it is not a dict."""
    return {key: value for key, value in row.items() if value is not None} if isinstance(row, dict) else {}
