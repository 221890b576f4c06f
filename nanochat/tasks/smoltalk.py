"""Conversations about everything (HuggingFaceTB/smol-smoltalk), to train on."""
from nanochat.tasks.common import Conversation, HubTask


class SmolTalk(HubTask):
    name, hub, folder, columns = "SmolTalk", "HuggingFaceTB/smol-smoltalk", "smoltalk", ("messages",)

    def __init__(self, argument: str, split: str) -> None:
        super().__init__("data", split)

    def converse(self, row: dict) -> Conversation:
        """messages: [{role, content}], maybe a system message first."""
        return {"messages": [{"role": message["role"], "content": message["content"]} for message in row["messages"]]}
