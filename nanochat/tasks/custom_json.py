"""
Your own conversations: a JSONL file, each line {"messages": [...]} or only the list of messages.

    json:/path/to/file.jsonl        one conversation in 20 is kept for the test split
    json:/path/to/file.jsonl:all    all of them, whichever split is asked for: a file that is one split already
"""
import json
from pathlib import Path

from nanochat.data.conversation import Conversation, check_conversation
from nanochat.data.task import Task
from nanochat.runtime.errors import UserError
from nanochat.tasks.common import split_of

TEST_SHARE = 20  # one conversation in 20 is for the test split
ONE_A_LINE = "expected a conversation on each line, as jq -c '.[]' makes of a JSON array"


class CustomJSON(Task):
    """
    The conversations of a file that belong to a split. Their own text decides, so equal conversations are never in both
    splits, and lines added later move none. Every line is checked at once: UserError with file and line.
    """
    name = "CustomJSON"

    def __init__(self, argument: str, split: str) -> None:
        path = argument.removesuffix(":all")
        self.conversations = []
        for conversation in read_conversations(Path(path)):
            key = json.dumps(conversation, sort_keys=True)
            if path != argument or split_of(key, TEST_SHARE) == split:
                self.conversations.append(conversation)
        if not self.conversations:
            raise UserError(f"{path} has no conversation for the {split} split (one in {TEST_SHARE} is for test); "
                            f"json:{path}:all takes all of them")

    def __len__(self) -> int:
        return len(self.conversations)

    def conversation(self, index: int) -> Conversation:
        return self.conversations[index]


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a JSONL file; blank lines are passed over."""
    try:
        with open(path, "rb") as file:
            return [read_conversation(line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_conversation(line: bytes, where: str) -> Conversation:
    """The conversation on a line; UserError, beginning with `where`, when it is none that can be trained on."""
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8 as well
        raise UserError(f"{where}: not JSON: {error}; {ONE_A_LINE}") from error
    conversation = {"messages": value} if isinstance(value, list) else value
    check_conversation(conversation, where)
    messages = conversation["messages"]
    if messages[-1]["role"] != "assistant":
        raise UserError(f"{where}: the last message must be the assistant's: there is nothing to learn after it")
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not message["content"]:
            raise UserError(f"{where}: message {number} is an empty answer; write one, or take the conversation away")
    return {"messages": messages}
